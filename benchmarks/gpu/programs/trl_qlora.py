"""TRL's SFTTrainer over a base in 4 bits (NF4, double quantisation), LoRA on all linear layers. ARG: a model folder."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

packing = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=packing, dtype=torch.bfloat16, device_map={"": 0}, attn_implementation="sdpa"
)
rows = Dataset.from_list([{"text": "one two three four five six seven eight nine ten " * 200} for _ in range(24)])
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, max_steps=3, per_device_train_batch_size=4, max_length=1024, bf16=True, gradient_checkpointing=True,
        learning_rate=2e-4, logging_steps=1, save_strategy="no", report_to="none",
    )  # fmt: skip
    SFTTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).train()  # fmt: skip
