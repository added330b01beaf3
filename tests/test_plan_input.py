"""`rollplex plan` on what people type and write: every broken setting, config, trace or file is one clear line."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollplex.cli import COMMANDS, RUNS, RollplexCLI, main, of_settings
from rollplex.config_names import check_command
from rollplex.planner.command import parser
from rollplex.planner.configs import gpus_of_config, read_config
from rollplex.planner.names import SECTIONS, check_names

ROOT = Path(__file__).resolve().parent.parent
CONFIG: dict[str, Any] = {
    "model": {
        "class_path": "rollplex.GRPOModule",
        "init_args": {"model": "Qwen2.5-VL-3B", "num_generations": 4, "max_completion_length": 64},
    },
    "data": {"class_path": "rollplex.VLMDataModule", "init_args": {"batch_size": 8, "max_prompt_length": 300}},
    "trainer": {
        "strategy": {
            "class_path": "rollplex.RollplexStrategy",
            "init_args": {"engine": {"class_path": "rollplex.engines.VLLMEngine", "init_args": {}}},
        },
        "callbacks": [{"class_path": "rollplex.callbacks.PhaseOffload", "init_args": {}}],
    },
}  # fmt: skip


def changed(where: str, value: Any) -> dict[str, Any]:
    """CONFIG with one entry, named by its path, set."""
    content = copy.deepcopy(CONFIG)
    *parents, last = [int(x) if x.isdigit() else x for x in where.split("/")]
    target: Any = content
    for name in parents:
        target = target[name]
    target[last] = value
    return content


def said(capsys, tmp_path: Path, content: Any, *flags: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    main(["plan", "--config", str(path), *flags])
    return " ".join(capsys.readouterr().out.split())


MODEL, DATA, STRATEGY = "model/init_args", "data/init_args", "trainer/strategy/init_args"
ENGINE, OFFLOAD = f"{STRATEGY}/engine/init_args", "trainer/callbacks/0/init_args"


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (f"{MODEL}/num_mini_batches", 0, "num_mini_batches=0 must be a whole number, at least 1"),
        (f"{MODEL}/num_generations", "four", "num_generations='four' must be a whole number"),
        (f"{MODEL}/max_completion_length", 1.5, "max_completion_length=1.5 must be a whole number"),
        (f"{MODEL}/beta", float("nan"), "beta=nan must be a finite number, at least 0"),
        (f"{MODEL}/freeze", ["nonsense"], r"freeze=\['nonsense'\] must be null or a list of vision_tower, projector"),
        (f"{MODEL}/freeze", "vision_tower", "freeze='vision_tower' must be null or a list of"),
        (f"{MODEL}/dtype", "float16", "dtype='float16' must be float32 or bfloat16"),
        (f"{MODEL}/prompts_per_pass", True, "prompts_per_pass=True must be a whole number"),
        (f"{DATA}/batch_size", [], r"batch_size=\[\] must be a whole number"),
        (f"{DATA}/max_prompt_length", -3, "max_prompt_length=-3 must be a whole number"),
        (f"{STRATEGY}/prefix_budget_bytes", 0, "prefix_budget_bytes=0 must be a whole number"),
        (f"{ENGINE}/vision", "both", "vision='both' is unknown; set engine or shared"),
        (f"{ENGINE}/gpu_memory_utilization", 2, "gpu_memory_utilization=2 must be a finite number from 0 to 1"),
        (f"{OFFLOAD}/update_chunk_bytes", "4GB", "update_chunk_bytes='4GB' must be a whole number"),
        (f"{OFFLOAD}/offload", ["moments"], r"offload names \['moments'\]; there are parameters"),
        (f"{OFFLOAD}/offload", ["gradients"], r"\['gradients'\] cannot leave the device; optimizer_moments"),
        (f"{OFFLOAD}/offload", ["masters", "masters"], "offload names masters twice; name each state once"),
        (f"{OFFLOAD}/pin", "x", "pin='x' must be true or false"),
        (f"{OFFLOAD}/update_chunk_bytes", "4e9", "update_chunk_bytes='4e9' must be a whole number"),
        (f"{OFFLOAD}/offload", "all", "offload='all' must be auto or a list"),
        ("trainer/devices", 0, "devices=0 must be a whole number"),
        ("trainer/devices", 8, "strategy=rollplex uses one device, but devices=8"),
        ("trainer/num_nodes", "x", "num_nodes='x' must be a whole number"),
        ("trainer", ["fit"], "trainer=.* must be a mapping"),
        ("modle", {}, r"the config has no section modle \(did you mean model\?\); there are seed_everything, trainer"),
        (f"{MODEL}/num_generation", 4, r"GRPOModule has no setting num_generation \(did you mean num_generations\?\)"),
        ("trainer/max_step", 4, r"trainer has no setting max_step \(did you mean max_steps\?\)"),
        ("model/init_args", 3, "init_args=3 of GRPOModule must be a mapping"),
        (f"{MODEL}/bogus", 1, "model: GRPOModule has no setting bogus; there are model, num_generations"),
        (f"{DATA}/bogus", 1, "data: VLMDataModule has no setting bogus"),
        (f"{STRATEGY}/bogus", 1, "trainer.strategy: RollplexStrategy has no setting bogus"),
        (f"{ENGINE}/bogus", 1, "engine: VLLMEngine has no setting bogus"),
        (f"{OFFLOAD}/bogus", 1, "trainer.callbacks: PhaseOffload has no setting bogus"),
        ("trainer/gradient_clip_val", 1.0, "gradient_clip_val=1.0 is for Lightning's own loop.*max_grad_norm"),
        ("trainer/accumulate_grad_batches", 4, "accumulate_grad_batches=4 is for .* lower that to save memory"),
        ("trainer/bogus", 1, "trainer has no setting bogus"),
        ("trainer/strategy", "nonsense", "trainer.strategy='nonsense' is unknown; set one of rollplex, rollplex_ddp"),
        (f"{STRATEGY}/engine", "x", "engine: there is no class x"),
        ("trainer/callbacks", ["x", 3], "trainer.callbacks: there is no class x"),
        ("trainer/callbacks", [3], "trainer.callbacks=3 must be a class_path"),
        (f"{DATA}/task", {"class_path": "no_such.Task"}, "data.task: no_such.Task cannot be imported"),
        ("trainer/strategy", "rollplex_zero2", "trainer.devices=auto takes every GPU .* say how many with --gpus"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_run_is_one_line(capsys, tmp_path, where, value, message):
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        said(capsys, tmp_path, changed(where, value))


@pytest.mark.parametrize("value", [None, 0, -1, 1e99, "x", "1e3", [], {}, [1], True, float("nan"), {"a": 1}])
def test_whatever_stands_in_a_config_is_planned_or_refused(capsys, tmp_path, value):
    """Every setting that a plan reads, and some sections."""
    names = {
        MODEL: (
            "num_generations", "max_completion_length", "num_mini_batches", "prompts_per_pass", "freeze", "dtype",
            "responses_per_pass", "beta", "prefix_checkpointing", "share_prefix",
        ),
        DATA: ("batch_size", "max_prompt_length"), STRATEGY: ("prefix_budget_bytes", "engine", "zero_optimization"),
        ENGINE: ("tensor_parallel_size", "kv_cache_memory_bytes", "max_num_seqs", "vision", "gpu_memory_utilization"),
        OFFLOAD: ("offload", "update_chunk_bytes"), "trainer": ("devices", "num_nodes", "strategy", "callbacks"),
        "model": ("init_args",), "data": ("init_args",),
    }  # fmt: skip
    for place, settings in names.items():
        for name in settings:
            try:
                said(capsys, tmp_path, changed(f"{place}/{name}", value), "--json", "--prompts", "8")
            except SystemExit as error:
                assert str(error).startswith("error: ") and "\n" not in str(error), (place, name)


@pytest.mark.parametrize("text", ["a: [", "\tx", "- 1\n- 2", "3"])
def test_a_file_that_is_no_config_is_one_line(capsys, tmp_path, text):
    with pytest.raises(SystemExit, match=r"error: .*config\.yaml(:| is no YAML)"):
        said(capsys, tmp_path, text)
    (tmp_path / "gpus.yaml").write_text(text)
    with pytest.raises(SystemExit, match=r"error: .*gpus\.yaml(:| is no YAML)"):
        main(["plan", "--model", "Qwen2.5-VL-7B", "--gpus-file", str(tmp_path / "gpus.yaml")])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}]}'])
def test_a_file_that_is_no_trace_is_one_line(tmp_path, text):
    (tmp_path / "step_000002.json").write_text(text)
    with pytest.raises(SystemExit, match=r"error: .*step_000002\.json is no trace of"):
        main(["plan", "--calibrate", str(tmp_path)])


def test_a_model_folder_that_is_none_is_one_line(tmp_path):
    for text in ("{}", "[", '{"model_type": "bert"}', '{"model_type": "qwen2_5_vl", "text_config": 3}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SystemExit, match="error: ") as error:
            main(["plan", "--model", str(tmp_path)])
        assert "\n" not in str(error.value), text


# ---- devices ----


@pytest.mark.parametrize(
    ("trainer", "gpus"),
    [
        ({}, 1), ({"devices": 2, "strategy": "rollplex_ddp"}, 2), ({"devices": "4", "strategy": "rollplex_zero3"}, 4),
        ({"devices": [0, 2], "strategy": "rollplex_ddp"}, 2), ({"devices": "0,1,3", "strategy": "rollplex_ddp"}, 3),
        ({"devices": 2, "num_nodes": 3, "strategy": "rollplex_zero2"}, 6), ({"devices": -1}, 1), ({"devices": [3]}, 1),
        ({"devices": "auto", "accelerator": "cpu", "strategy": "rollplex_ddp"}, 1),
    ],
)  # fmt: skip
def test_devices_are_counted_as_lightning_does(trainer, gpus):
    assert gpus_of_config({"trainer": trainer}) == gpus


@pytest.mark.parametrize("devices", [-1, "auto", "-1", None])
def test_devices_that_the_machine_decides_must_be_said(capsys, tmp_path, devices):
    content = changed(
        "trainer/strategy", {"class_path": "rollplex.RollplexDeepSpeedStrategy", "init_args": {"stage": 3}}
    )
    if devices is not None:
        content["trainer"]["devices"] = devices
    with pytest.raises(SystemExit, match=r"takes every GPU of the machine"):
        said(capsys, tmp_path, content)
    assert "on each of 4 H100" in said(capsys, tmp_path, content, "--gpus", "4")


# ---- what is said ----


def test_assumptions_are_said(capsys, tmp_path):
    content = changed("data/init_args", {})
    out = said(capsys, tmp_path, content)
    assert "assumed: 1800 tokens a prompt (data's max_prompt_length or --prompt-tokens is not set)" in out
    assert "64 prompts in a rollout batch" in out and "100 % of a prompt's tokens are visual" in out
    out = said(capsys, tmp_path, CONFIG, "--visual-share", "0.5", "--sigma", "0", "--workspace-gib", "1")
    assert "tokens a prompt" not in out and "visual" not in out.split("assumed:")[1]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    main(["plan", "--config", str(tmp_path / "config.yaml"), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert any(text.startswith("1800 tokens a prompt") for text in facts["assumptions"])


def test_naive_is_everything_at_once_in_table_sentence_and_json(capsys, tmp_path, parity_folder):
    """And a tiny plan has one unit."""
    content = changed(f"{MODEL}/model", str(parity_folder))
    content["trainer"]["accelerator"] = "cpu"
    content["trainer"]["strategy"] = "rollplex"
    out = said(capsys, tmp_path, content)
    assert "MiB" in out and "GiB" not in out.split("Predicted step")[0]
    naive = float(out.split("(naive) fits: ")[1].split()[0].replace(",", ""))
    assert f"│ total │ │ {naive:.1f} │" in out
    main(["plan", "--config", str(tmp_path / "config.yaml"), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["naive_gib"] * 1024 == pytest.approx(naive, abs=0.06)
    assert facts["naive_gib"] == pytest.approx(sum(facts["states_gib"].values()))
    assert max(facts["stages_gib"].values()) <= facts["without_offload_gib"] <= facts["naive_gib"]


def test_a_plan_of_zero_has_its_states_on_every_rank(capsys, tmp_path):
    """Without PhaseOffload's moves that stage 3 refuses; offloading them by name is an error, as in the run."""
    content = changed(
        "trainer/strategy", {"class_path": "rollplex.RollplexDeepSpeedStrategy", "init_args": {"stage": 3}}
    )
    content["trainer"]["devices"] = 4
    out = said(capsys, tmp_path, content)
    assert "PhaseOffload: reference_weights, kv_pool, prefix_activations leave" in out and "engine weights" in out
    content["trainer"]["callbacks"][0]["init_args"] = {"offload": ["masters"]}
    with pytest.raises(
        SystemExit, match="masters cannot leave the device: ZeRO-3 moves states of DeepSpeed's FusedAdam"
    ):
        said(capsys, tmp_path, content)
    content["trainer"]["callbacks"][0]["init_args"] = {"update_chunk_bytes": 10**9}
    with pytest.raises(SystemExit, match="update_chunk_bytes=1000000000 needs strategy rollplex or rollplex_ddp"):
        said(capsys, tmp_path, content)


def test_lora_is_planned_with_what_is_assumed_on_one_rank_and_on_several(capsys, tmp_path, parity_folder):
    content = changed(f"{MODEL}/model", str(parity_folder))
    content["model"]["init_args"]["lora"] = {"r": 2}
    assert "although lora trains adapters" in said(capsys, tmp_path, content)
    content["trainer"] |= {"devices": 2, "strategy": "rollplex_zero2"}
    assert "although lora trains adapters" in said(capsys, tmp_path, content)


def test_a_config_is_read_whatever_its_sections_are(tmp_path):
    (tmp_path / "x.yaml").write_text("model: rollplex.GRPOModule\ntrainer:\n")
    assert read_config(str(tmp_path / "x.yaml"))["model"] == "rollplex.GRPOModule"


# ---- advice ----


def random_content(seed: int) -> tuple[dict[str, Any], list[str]]:
    """A config and the flags it is planned with."""
    draw = random.Random(seed)
    name = draw.choice(["RollplexStrategy", "RollplexDDPStrategy", "RollplexDeepSpeedStrategy"])
    content = changed("trainer/strategy", {"class_path": f"rollplex.{name}", "init_args": {}})
    settings = content["trainer"]["strategy"]["init_args"]
    if "DeepSpeed" in name:
        settings["stage"] = draw.choice([1, 2, 3])
    if name != "RollplexStrategy":
        content["trainer"]["devices"] = draw.choice([2, 4, 8])
    if draw.random() < 0.5:
        pool = {"kv_cache_memory_bytes": draw.choice([4, 16]) * 2**30}
        settings["engine"] = {"class_path": "rollplex.engines.VLLMEngine", "init_args": pool}
    content["model"]["init_args"] |= {
        "model": draw.choice(["Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "Qwen3-VL-8B"]), "beta": draw.choice([0.0, 0.04]),
        "dtype": draw.choice(["float32", "bfloat16"]), "max_completion_length": draw.choice([256, 1024]),
        "prompts_per_pass": draw.choice([1, 4]),
    }  # fmt: skip
    content["data"]["init_args"] |= {"batch_size": 64, "max_prompt_length": draw.choice([500, 2000, 6000])}
    names = ["PrefixOverlap"] if draw.random() < 0.7 else []
    content["trainer"]["callbacks"] = [{"class_path": f"rollplex.callbacks.{n}", "init_args": {}} for n in names]
    return content, ["--json", "--gpu", draw.choice(["L40S", "A100", "H200"])]


def follow(content: dict[str, Any], advice: str) -> None:
    """Write one line of advice into a config, as somebody would who knows where settings are."""
    found = re.fullmatch(r"(.*?) (none|\S+|\[.*\]) -> (.*)", advice)
    assert found, advice
    name, value = found[1], yaml.safe_load(found[3].replace("'", '"'))
    trainer = content["trainer"]
    if "PhaseOffload" in name:
        entry = next((c for c in trainer["callbacks"] if "PhaseOffload" in c["class_path"]), None)
        if entry is None:
            entry = {"class_path": "rollplex.callbacks.PhaseOffload", "init_args": {}}
            trainer["callbacks"].append(entry)
        entry["init_args"][name.split()[-1]] = value
    elif name == "callbacks: SharedWeights":
        trainer["callbacks"].append({"class_path": "rollplex.callbacks.SharedWeights", "init_args": {}})
    elif name in ("kv_cache_memory_bytes", "max_num_seqs"):
        engine = trainer["strategy"]["init_args"].setdefault("engine", {"class_path": "TorchEngine", "init_args": {}})
        engine["init_args"][name] = value
    else:
        content["data" if name == "batch_size" else "model"]["init_args"][name] = value


def test_twenty_configs_that_cannot_fit_do_with_what_their_plan_says(capsys, tmp_path):
    """The advice is written into the YAML, and that is planned again."""
    path, helped, hopeless = tmp_path / "config.yaml", 0, 0
    for seed in range(200):
        content, flags = random_content(seed)
        path.write_text(yaml.safe_dump(content))
        main(["plan", "--config", str(path), *flags])
        before = json.loads(capsys.readouterr().out)
        if before["fits"] or before["changes"] is None:
            hopeless += before["changes"] is None
            continue
        for line in sorted(before["changes"], key=lambda text: "update_chunk_bytes" in text):
            follow(content, line)
        path.write_text(yaml.safe_dump(content))
        main(["plan", "--config", str(path), *flags])
        after = json.loads(capsys.readouterr().out)
        assert after["fits"], (seed, before["changes"])
        helped += 1
        if helped == 20:
            break
    assert helped == 20 and hopeless < 20


def test_the_sections_are_those_of_the_run(capsys):
    root = Path(__file__).resolve().parent.parent
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(root / "configs" / "digits_cpu.yaml"), "--print_config"])
    printed = set(yaml.safe_load(capsys.readouterr().out))
    assert printed <= set(SECTIONS) <= printed | {"optimizer", "lr_scheduler"}, printed


# ---- the same names, on the command line of a run ----

COLOURS = """
from lightning.pytorch.loggers import Logger
from rollplex.tasks.charts import Charts


class Colours(Charts):
    pass


class Notes(Logger):
    def __init__(self, folder, **kwargs):
        super().__init__()


def make_notes(folder):
    return Notes(folder)
"""


def run_config(folder: Path, **changes) -> str:
    """A config of `rollplex fit` with settings changed by their path (`a/b/c`); returns its path."""
    content = yaml.safe_load((ROOT / "configs" / "charts_cpu.yaml").read_text())
    for name, value in changes.items():
        *parts, last = name.split("/")
        here = content
        for part in parts:
            here = here[part]
        here[last] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture
def colours(tmp_path, monkeypatch):
    (tmp_path / "colours.py").write_text(COLOURS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({f"{MODEL}/num_generation": 4}, [], r"model: GRPOModule has no setting num_generation \(did you mean num_gene"),
        ({}, ["--model.init_args.num_generation", "4"], r"no setting num_generation \(did you mean num_generations\?\)$"),
        ({}, ["--model.num_generation=4"], r"no setting num_generation \(did you mean num_generations\?\)$"),
        ({f"{DATA}/task": {"class_path": "colours.Colour"}}, [], r"no class colours.Colour; did you mean colours.Colours"),
        ({}, ["--data.task", "colours.Colour"], r"data.task: there is no class colours.Colour; did you mean"),
        ({}, ["--data.init_args.task.train_sizes", "4"], r"data.task: Charts has no setting train_sizes \(did you mean t"),
        ({"modle": {}}, [], r"no section modle \(did you mean model\?\)"),
        ({}, ["--trianer.max_steps", "4"], r"no section trianer \(did you mean trainer\?\)"),
        ({}, ["--trainer.max_step=4"], r"trainer has no setting max_step \(did you mean max_steps\?\)"),
        ({}, ["--trainer.strategy", "rolplex"], "'rolplex' is unknown; did you mean rollplex\\? set one of rollplex, "),
        ({}, ["--config", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
    ],
)  # fmt: skip
def test_a_run_names_what_is_misspelt_before_it_parses(colours, changes, flags, message):
    with pytest.raises(ValueError, match=message) as raised:
        main(["fit", "--config", run_config(colours, **changes), *flags])
    assert of_settings(raised.value) is raised.value and len(str(raised.value).splitlines()) == 1


def test_a_misspelt_setting_is_one_line(colours, monkeypatch, capsys):
    path = run_config(colours, **{f"{MODEL}/num_generation": 4})
    monkeypatch.setattr("sys.argv", ["rollplex", "fit", "--config", path])
    with pytest.raises(SystemExit) as raised:
        main()
    error = capsys.readouterr().err.splitlines()
    assert raised.value.code == 2 and error[1:] == ["(ROLLPLEX_TRACEBACK=1 shows where)"]
    assert error[0] == "error: model: GRPOModule has no setting num_generation (did you mean num_generations?)"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_config_is_refused(path):
    check_command(["--config", str(path), "--trainer.max_steps", "3", "--model.num_generations=4", "--print_config"])


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"trainer/logger": {"class_path": "colours.Notes", "init_args": {"folder": ".", "what": 1}}}, []),
        ({"trainer/logger": [{"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"tags": []}}]}, []),
        ({"trainer/logger": {"class_path": "colours.make_notes", "init_args": {"folder": "."}}}, []),
        ({"trainer/strategy": "ddp"}, ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_epochs=1"]),
        ({f"{DATA}/task": {"class_path": "colours.Colours", "init_args": {"train_size": 4}}}, ["--data.task.seed=3"]),
        ({}, ["--data.task", "colours.Colours", "--data.task.train_size", "8", "--ckpt_path", "last"]),
        ({}, ["--model.help", "rollplex.GRPOModule", "--seed_everything=1", "--trainer.strategy=null"]),
        ({}, ["--trainer.strategy", "RollplexStrategy", "--trainer.strategy.engine", "TorchEngine"]),
    ],
)
def test_what_cannot_be_judged_is_left_to_the_parser(colours, changes, flags):
    check_command(["--config", run_config(colours, **changes), *flags])


FILES = {
    "class_path": "rollplex.tasks.files.FileTask",
    "init_args": {"path": "a", "rewards+": [{"class_path": "Ours"}]},
}


@pytest.mark.parametrize(
    "flags",
    [
        ["--data.task", "colours.Notes", "--data.task.least", "-0.5"],
        ["--data.task.question", "-- left. Or right", "--model.init_args.beta", "-.5"],
        ["--model", "part.yaml", "--model.beta", "0.1"],
        ["--data.task", "task.yaml", "--data.task.path", "a"],
        ["--data.task", '{"class_path": "rollplex.tasks.files.FileTask"}', "--data.task.path", "a"],
        ["--data.task", "{class_path: [", "--data.task.path", "a"],
        ["--config", "seed_everything: 1  # " + 300 * "x"],
        ["--config", "seed_everything: 1\nckpt_path: a.yaml"],
        ["--config", "files.yaml"],
    ],
)
def test_what_the_parser_takes_is_not_refused(colours, monkeypatch, flags):
    """Values with dashes, parts of a config in files of their own, text in the place of a file, lists that go on."""
    content = yaml.safe_load((ROOT / "configs" / "charts_cpu.yaml").read_text())
    files = {
        "part": content["model"],
        "task": FILES,
        "files": {"data": content["data"] | {"init_args": {"task": FILES}}},
    }
    for name, part in files.items():
        (colours / f"{name}.yaml").write_text(yaml.safe_dump(part))
    monkeypatch.chdir(colours)
    check_command(["--config", run_config(colours), *flags])


def test_a_part_in_a_file_of_its_own_is_looked_at_too(colours, monkeypatch):
    (colours / "part.yaml").write_text(yaml.safe_dump(FILES))
    monkeypatch.chdir(colours)
    with pytest.raises(ValueError, match=r"FileTask has no setting pth \(did you mean path\?\)"):
        check_command(["--config", run_config(colours), "--data.task", "part.yaml", "--data.task.pth", "a"])


def test_a_reward_needs_no_module_in_a_plan_either():
    rewards = [{"class_path": "ExactMatch"}, {"class_path": "FormatRegex", "init_args": {"pattern": "a"}}]
    check_names(
        {"data": {"class_path": "VLMDataModule", "init_args": {"task": FILES | {"init_args": {"rewards": rewards}}}}}
    )


class OwnCLI(RollplexCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--notes.depth", type=int, default=1)


def test_a_cli_of_ones_own_may_have_more_sections(colours, capsys):
    path = run_config(colours, notes={"depth": 2})
    with pytest.raises(SystemExit) as ended:
        OwnCLI(args=["fit", "--config", path, "--notes.depth", "3", "--print_config"])
    assert ended.value.code == 0 and yaml.safe_load(capsys.readouterr().out)["notes"] == {"depth": 3}
    with pytest.raises(ValueError, match="no section notes"):
        RollplexCLI(args=["fit", "--config", path, "--notes.depth", "3", "--print_config"])


# ---- the commands ----


def test_the_help_names_every_command_in_one_line_each(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert raised.value.code == 0 and max(map(len, lines)) <= 120
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*RUNS, *COMMANDS]


def test_an_unknown_command_names_all_eight(capsys):
    with pytest.raises(SystemExit):
        main(["exprot"])
    error = capsys.readouterr().err
    assert "did you mean export?" in error and all(name in error for name in (*RUNS, *COMMANDS))
    with pytest.raises(SystemExit):
        main([])
    assert "usage: rollplex COMMAND" in capsys.readouterr().err


def test_every_flag_of_a_plan_says_what_it_is():
    silent = [a.option_strings for a in parser()._actions if not a.help or a.help.startswith("default")]
    assert not silent


def test_a_plan_says_first_that_it_assumes_the_prompts_length(capsys, tmp_path):
    flags = ["--model", "Qwen2.5-VL-7B"]
    main(["plan", *flags])
    out = capsys.readouterr().out
    assert out.startswith("assumed, because neither the config nor a flag says it: 1800 tokens a prompt")
    assert "naive: everything on the GPU" in out and "hidden: training done while" in " ".join(out.split())
    main(["plan", *flags, "--prompt-tokens", "700"])
    assert "neither the config" not in capsys.readouterr().out
