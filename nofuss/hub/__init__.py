"""Models on the Hugging Face Hub: pushed as safetensors and JSON, loaded by `hf://user/name`.

address (parse, pin) → upload (`nofuss push`); download (`nofuss.load`): cached, checksums verified
"""
