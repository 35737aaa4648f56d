"""HY4's own: names of its tensors in files, gates that are held, streams that enter layers. Its logits and its bits are
asked for where all kinds of models are (test_families, test_sparse)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.models.config import read_config
from headrace.models.decoder import TokenBatch, load_decoder
from tests.support.checkpoint_files import rename
from tests.support.checkpoints import FolderOf, build_model, edit_json, make_checkpoint
from tests.support.traces import run, same

pytestmark = pytest.mark.cpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [(7 * n + 3) % 320 for n in range(90)]
PUBLISHED = {".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.", ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre."}
IN_MEMORY = {
    ".hc_pre.hc_attn_layer.hc_": ".attn_hc.", ".hc_pre.hc_mlp_layer.hc_": ".ffn_hc.",
    ".hc_pre.hc_head.hc_head_": ".hc_head.hc_", ".learnable_sink_param": ".sinks", ".linear_gate": ".gate_proj",
}  # fmt: skip


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "kv_cache_tokens": 1024, **settings})


def called(names: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


@pytest.mark.parametrize("names", [PUBLISHED, IN_MEMORY], ids=["otherwise", "in memory"])
def test_tensors_are_found_by_any_of_their_names(names: dict[str, str], folder_of: FolderOf, tmp_path: Path) -> None:
    make_checkpoint("hy4", tmp_path)
    rename(tmp_path, lambda tensors: called(names, tensors))
    same(run(engine(tmp_path), [PROMPT], GREEDY), run(engine(folder_of("hy4")), [PROMPT], GREEDY))


def test_experts_may_lie_each_in_its_own_tensors(folder_of: FolderOf, tmp_path: Path) -> None:
    def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            before, _, fused = name.partition(".experts.")
            parts = {"down_proj": ["down"], "gate_up_proj": ["gate", "up"]}.get(fused, [])
            for expert, rows in enumerate(tensor if parts else ()):
                own = zip(parts, rows.chunk(len(parts)), strict=True)
                found |= {f"{before}.experts.{expert}.{part}_proj.weight": each.clone() for part, each in own}
            found |= {} if parts else {name: tensor}
        return found

    make_checkpoint("hy4", tmp_path)
    rename(tmp_path, apart)
    same(run(engine(tmp_path), [PROMPT], GREEDY), run(engine(folder_of("hy4")), [PROMPT], GREEDY))


def test_a_tensor_that_is_there_by_two_names_is_refused(tmp_path: Path) -> None:
    make_checkpoint("hy4", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, path, {"format": "pt"})
    told = r"learnable_sink_param is there as model\.layers\.0\.self_attn\.sinks too"
    with pytest.raises(ValueError, match=told):
        engine(tmp_path)


def test_gates_of_experts_are_held(tmp_path: Path) -> None:
    """Experts whose gates are far beyond the limit, beside dense and shared MLPs, which have none."""
    model = build_model("hy4")
    held: list[Any] = [module for module in model.modules() if hasattr(module, "swiglu_limit")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "mlp.gate_proj.weight", "shared_experts.gate_proj.weight")):
                parameter.mul_(16)
        model.save_pretrained(tmp_path)
        want = model(torch.tensor([PROMPT])).logits[0]
        for module in held:
            module.swiglu_limit = 1e9
        free = model(torch.tensor([PROMPT])).logits[0]
    got = engine(tmp_path).logits(PROMPT)
    assert (got - want).norm() < 1e-5 * want.norm()
    assert (free - want).norm() > 0.1 * want.norm(), "the limit counts for something"


def test_what_enters_a_layer_makes_its_keys_again(folder_of: FolderOf) -> None:
    """All streams of a row, as activations are kept of them; test_kv_projection asks it of all kinds in bf16."""
    decoder = load_decoder(folder_of("hy4"), "bfloat16")
    assert decoder.config.stream_size == 3 * decoder.config.hidden_size
    positions = torch.arange(len(PROMPT))
    x, _ = decoder.enter(TokenBatch(torch.tensor(PROMPT), positions))
    assert x.shape == (len(PROMPT), decoder.config.stream_size)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(swiglu_limit=7.0), "swiglu_limit 7.0 is not supported; only 10.0 is"),
        (dict(hc_mult=9), "hc_mult 9 is not supported; 1 to 8 are"),
        (dict(layer_types=["full_attention"] * 3), "layer_types with 'full_attention' is not supported"),
        (dict(indexer_types=["shared", "full", "full"]), "the first must be full"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = make_checkpoint("hy4", tmp_path)
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=told):
        read_config(folder)
