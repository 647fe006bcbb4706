#!/usr/bin/env bash
# The first hour with shardkit, in two minutes on two CPU cores: plan, fine-tune with LoRA, interrupt, continue, report, merge, load.
#   bash examples/first_hour.sh [FOLDER]       everything is written in FOLDER, ./first-hour by default
# docs/finetune.md explains each command. On GPUs, start from configs/sft_lora.yaml and leave run.device out.
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:-first-hour}"
cd "${1:-first-hour}"

say() { printf '\n== %s\n' "$*"; }

say "1. a model folder and 300 conversations; yours replace them"
python "$examples/first_hour.py" .
cp "$examples/first_hour.yaml" recipe.yaml

say "2. does it fit on two ranks of 2 GiB?"
shardkit plan recipe.yaml --gpus 2 --memory-cap 2GiB

say "3. train on two ranks, and interrupt after 15 of the 40 steps, as a machine does that is taken back"
shardkit launch recipe.yaml --nproc-per-node 2 &
launcher=$!
until grep -qs '"step": 15,' runs/first_hour/metrics.jsonl; do
  kill -0 "$launcher"  # ends this script if the run ended by itself
  sleep 0.2
done
kill -TERM "$launcher"
wait "$launcher" || echo "(exit code $?)"

say "4. continue"
shardkit launch recipe.yaml --nproc-per-node 2 run.resume=true

say "5. one page that shows the run"
shardkit report runs/first_hour

say "6. the model with its adapter merged into it"
shardkit convert runs/first_hour --merge --to safetensors --out served

say "7. load it as anybody does"
python - <<'PYTHON'
import logging

for library in ("torchao", "torch.utils._pytree"):  # their warnings while transformers loads concern no user of it
    logging.getLogger(library).setLevel(logging.ERROR)
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained("served")
tokenizer = AutoTokenizer.from_pretrained("served")
chat = [{"role": "user", "content": "What is 2 + 2?"}]
tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = model.generate(**tokens, max_new_tokens=12, do_sample=False)[0, tokens["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
PYTHON
