#!/usr/bin/env bash
# From nothing to a trained model: .venv, a tiny vision-language model, GRPO on real images, evaluation.
# Arguments go to `rollplex fit`, e.g. `bash scripts/quickstart.sh --trainer.max_steps 20`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

config=configs/digits_cpu.yaml
model=models/tiny-digits
runs=runs/digits

set_up core
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false DO_NOT_TRACK=1 WANDB_MODE="${WANDB_MODE:-offline}"

if [ -f "$model/config.json" ] && [ -f "$model/model.safetensors" ]; then
    echo "model: using $model (delete it to build it anew)"
else
    echo "model: building $model"
    "$PYTHON" -m rollplex.models.tiny --out "$model" || die "the tiny model could not be built (see above)"
fi

if [ -f "$runs/checkpoints/last.ckpt" ] && [[ "$*" != *ckpt_path* ]]; then
    echo "training: $runs holds an earlier run; it is kept, and this one starts anew (to go on with it instead:"
    echo "          .venv/bin/rollplex fit --config $config --ckpt_path last)"
fi
started="$(mktemp)"  # tells this run's files from older ones
trap 'rm -f "$started"' EXIT
interrupted=
trap 'interrupted=yes' INT  # `fit` saves and ends by itself on Ctrl-C
echo "training: two to three minutes; the reward stays low while the answer's form is learnt, then climbs (update 60 on)"
echo "training: rollplex fit --config $config $*"
"$VENV/bin/rollplex" fit --config "$config" "$@" || [ -n "$interrupted" ] || die "training stopped (see above)"
if [ -n "$interrupted" ]; then
    echo "stopped; go on with: .venv/bin/rollplex fit --config $config --ckpt_path last"
    exit 130
fi
trap - INT

echo "evaluation: rollplex validate --config $config --ckpt_path last"
"$VENV/bin/rollplex" validate --config "$config" --ckpt_path last || die "evaluation failed (see above)"

echo
echo "results in $runs/"
echo "  samples with picture, prompt, response, reward: $runs/rollouts/"
echo "  all of it as one page:                          .venv/bin/pip install -e \".[report]\" && .venv/bin/rollplex report $runs"
echo "  both lanes of a step, for ui.perfetto.dev:      $runs/timeline/"
echo "  the trained model, for from_pretrained:         $(ls -td "$runs"/export* | head -n 1)"
echo "  checkpoints; metrics of training, then of the evaluation:"
find "$runs" -newer "$started" -type f \( -name '*.ckpt' -o -name metrics.csv \) |
    sort -V | sed 's/^/    /'
if find "$runs" -name '*tfevents*' 2>/dev/null | grep -q .; then
    echo "curves:  .venv/bin/tensorboard --logdir $runs"
fi
if find "$runs" wandb -maxdepth 3 -name 'offline-run-*' 2>/dev/null | grep -q .; then
    echo "W&B:     runs stay on this disk; with an account: .venv/bin/wandb sync <an offline-run-* folder>"
fi
