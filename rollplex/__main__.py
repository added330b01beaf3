"""`python -m rollplex`: the command, for launchers that start a module (`torchrun -m rollplex fit ...`)."""

from rollplex.cli import main

if __name__ == "__main__":
    main()
