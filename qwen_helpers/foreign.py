"""Folders that hold something else than a model as transformers saves it: say what, and what to do about it."""
import re
from fnmatch import filter as matching

from .config import INDEX, SINGLE, shown

MERGED = "merge it into its model (merge_and_unload() in peft), save that, and give its folder"
SAVED = "take this model as save_pretrained of transformers writes it"
FILES = (           # what may lie where model.safetensors should: pattern, what it is, what to do
    ("adapter_*", "a LoRA adapter without its model", MERGED),
    ("*.gguf", "a file for llama.cpp", SAVED),
    *((pattern, "which is not safetensors", f"load it with what wrote it, if you trust it, or {SAVED}") for pattern in
      ("pytorch_model*", "consolidated*.pth", "*.pth", "*.pt", "*.ckpt", "*.distcp", "*.npz", "*.h5", "*.msgpack")),
    ("*-of-00001.safetensors", "a single shard without an index", "rename it to model.safetensors"),
    ("*-of-*.safetensors", "shards without an index", "fetch model.safetensors.index.json from where they come from"),
    ("*.safetensors", "a file of another name", "rename it to model.safetensors, if it holds the whole model"),
)
TENSORS = (         # what names of tensors may look like: pattern, what that says of their file, what to do
    (r"\.(weight_scale(_inv|_2)?|(input|output)_scale|weight_(packed|shape|zero_point|format)|SCB|absmax|quant_map"
     r"|nested_\w+|quant_state\..+|qweight|qzeros|g_idx|scales|biases)$",
     "its weights are quantised", "take the version of this model that is not"),
    (r"^base_model\.|\.base_layer\.|lora_|\.modules_to_save\.|\.original_module\.",
     "there is a LoRA adapter in it", MERGED),
    (r"(^|\.)(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.",
     "it was saved with the wrapper of torch.compile, DDP or FSDP", "save the model inside of that by save_pretrained"),
    (r"\.(experts|shared_expert|shared_expert_gate)\.|\.mlp\.gate\.weight$", "it is a mixture of experts",
     "take a dense model, as Qwen3.5-0.8B is"),
    (r"\.(in_proj_qkvz|in_proj_ba|qkv_proj|gate_up_proj)\.", "it joins matrices that lie apart in Qwen3.5", SAVED),
    (r"^language_model\.(model|lm_head)\.", "it is named as MLX names a model", SAVED),
    (r"^(?!(model\.)?(language_model\.)?layers\.|mtp\.)(.*\.)?layers\.0\.",
     "names in Qwen3.5 begin in another way", SAVED),
)


def what_folder(path):
    """One sentence about a folder without weights or config.json, or "" if nothing in it says more."""
    names = sorted(file.name for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    for pattern, what, remedy in () if {SINGLE, INDEX} & set(names) else FILES:
        for name in matching(names, pattern):
            return f"{path} has no model.safetensors, only {shown(name)}, {what}: {remedy}"
    for below in (*path.glob("*/model*.safetensors"), *path.glob("snapshots/*/model*.safetensors")):
        return f"{path} is no model folder itself: give one that lies in it, {below.parent}"
    return ""


def what_tensors(files, names):
    """One sentence about tensors of these names, by name -> file, or "" if nothing in their names says more."""
    for pattern, what, remedy in TENSORS:
        for name in filter(re.compile(pattern).search, sorted(names)):
            return f"{files[name]} holds {shown(name)}: {what}; {remedy}"
    return ""
