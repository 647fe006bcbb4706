"""Export to safetensors and plain state dicts; import from those, from DeepSpeed's folders and from DCP's."""
