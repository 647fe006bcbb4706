"""transformers' Trainer with a Llama of a billion parameters from its config: full, or --lora with peft."""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

SEQ = 2048
config = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4, max_position_embeddings=SEQ, tie_word_embeddings=False,
)  # fmt: skip
lora = "--lora" in sys.argv
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
if lora:
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.enable_input_require_grads()
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32000, (24, SEQ))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2 if lora else 1, bf16=True,
        gradient_checkpointing=True, optim="adamw_torch_fused", learning_rate=1e-5, logging_steps=1,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train()
