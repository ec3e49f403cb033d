"""Makes a small model with random weights whose layers read windows and everything by turns: Gemma 3 in small.

    hybrid_model.py FOLDER TOKENIZER_FOLDER WINDOW LAYERS

LAYERS is a letter for each layer: w for one with a window, f for full attention.
"""

import pathlib
import shutil
import sys

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

KINDS = {"w": "sliding_attention", "f": "full_attention"}


def main() -> None:
    folder, tokenizer, window = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(20)
    config = Gemma3TextConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(sys.argv[4]),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=4096,
        sliding_window=window,
        layer_types=[KINDS[letter] for letter in sys.argv[4]],
        initializer_range=0.1,
        torch_dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        # What a token is counts less for the next one than what heads find, so that KV that is wrong shows in the tokens.
        model.model.embed_tokens.weight.mul_(0.1)
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight", "post_attention_layernorm.weight")):
                weight.fill_(1.0)
    model.save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    main()
