"""ZeRO-1/2/3 through DeepSpeed. Nothing else imports deepspeed."""
