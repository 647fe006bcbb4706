"""Train LoRA over a base in 4 bits with transformers' Trainer, peft and bitsandbytes; print the peak of tensors."""

from __future__ import annotations

import sys

import torch


def main(model: str, out: str, seq_len: int) -> None:
    """Args: the model's folder with its weights, a folder to write to, tokens of a sample."""
    import peft
    import transformers

    from shardkit.memory.tracing.tracker import TensorTracker

    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        output_dir=out, use_cpu=True, per_device_train_batch_size=2, bf16=True, gradient_checkpointing=True,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=3,
    )  # fmt: skip
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=packing, device_map={"": "cpu"}
    )
    base.enable_input_require_grads()
    lora = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    network = peft.get_peft_model(base, lora)
    state = [
        tensor
        for param in network.parameters()
        if (packed := getattr(param, "quant_state", None)) is not None
        for tensor in (packed.absmax, packed.code, packed.offset, packed.state2.absmax, packed.state2.code)
    ]
    tokens = [torch.randint(0, network.config.vocab_size, (seq_len,)) for _ in range(64)]
    data = [{"input_ids": sample, "labels": sample} for sample in tokens]
    trainer = transformers.Trainer(model=network, args=args, train_dataset=data)
    tracker = TensorTracker()
    with tracker:
        tracker.see([*network.parameters(), *network.buffers(), *state])
        trainer.train()
    print(f"peak {tracker.peak('cpu')}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
