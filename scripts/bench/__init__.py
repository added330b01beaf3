"""What scripts/bench_step.py is made of: one workload, several trainers, one step at a time in turn."""
