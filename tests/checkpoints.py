"""Random checkpoints of exactly the real layout, for tests: every tensor random, norm weights too."""
import json

import torch
from safetensors.torch import save_file

from qwen_helpers.weights import expected_shapes, load_config

PITFALL = dict(vocab_size=29, hidden_size=24, intermediate_size=40, num_hidden_layers=4,
               layer_types=["linear_attention"] * 3 + ["full_attention"],
               num_attention_heads=4, num_key_value_heads=2, head_dim=8,
               linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=6,
               linear_conv_kernel_dim=4, rms_norm_eps=1e-6, tie_word_embeddings=True, max_position_embeddings=4096,
               mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, hidden_act="silu", attn_output_gate=True,
               rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                                    mrope_section=[1, 0, 0], mrope_interleaved=True))

REAL = dict(vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,     # Qwen3.5-0.8B
            layer_types=PITFALL["layer_types"] * 6, full_attention_interval=4,
            num_attention_heads=8, num_key_value_heads=2, head_dim=256,
            linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
            linear_conv_kernel_dim=4, rms_norm_eps=1e-6, tie_word_embeddings=True, max_position_embeddings=262144,
            mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, hidden_act="silu", attn_output_gate=True,
            mamba_ssm_dtype="float32",
            rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                                 mrope_section=[11, 11, 10], mrope_interleaved=True))


def random_tensor(name, shape, draw):
    """A value of the kind that the tensor has in a trained checkpoint."""
    if name.endswith("A_log"):
        return torch.empty(shape, dtype=torch.float64).uniform_(0.02, 1, generator=draw).log()
    scale = 0.5 if len(shape) == 1 else shape[-1] ** -0.5
    value = torch.empty(shape, dtype=torch.float64).normal_(generator=draw) * scale
    return value + (name.endswith("linear_attn.norm.weight"))


def write_checkpoint(folder, text=PITFALL, nested=True, prefix="model.language_model.", shards=1, vision=0,
                     mtp=True, dtype=torch.float64, seed=0):
    """Write config.json and safetensors of a random model into `folder`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = {"model_type": "qwen3_5", "text_config": text} if nested else {"model_type": "qwen3_5_text", **text}
    (folder / "config.json").write_text(json.dumps(kind | {"tie_word_embeddings": text["tie_word_embeddings"]}))
    cfg, draw = load_config(folder), torch.Generator().manual_seed(seed)
    tensors = {name if name == "lm_head.weight" else prefix + name: random_tensor(name, shape, draw)
               for name, shape in expected_shapes(cfg).items()}
    if mtp:
        tensors |= {"mtp." + name: random_tensor(name, shape, draw)
                    for name, shape in expected_shapes(cfg, "mtp.").items()}
    tensors |= {f"model.visual.blocks.{i}.weight": torch.zeros(2, 3, dtype=torch.float64) for i in range(vision)}
    tensors = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / f"part-{i}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
