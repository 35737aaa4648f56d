"""Hyper-connections: C++ and torch against transformers' classes and fp64, and the same bits for a row in any company.

T: rows, S: streams, H: width of one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import Glm5NextTextConfig, HYV4Config
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead

from headrace.kernels import cpu, dispatch, hyper
from headrace.kernels.hyper import Bounds, Counts, Mixing

pytestmark = pytest.mark.cpu
needs_extension = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
DTYPES = [torch.float32, torch.bfloat16]
MIXED = Bounds(eps=1e-5, least=1e-3, magnitude=2.0, rounds=20)
"""Of streams that go on in each other."""
BOUNDS = Bounds(eps=1e-5, least=1e-3, magnitude=1.5, post_least=1e-3)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixing(streams: int, width: int, kinds: int = 2) -> Mixing:
    outputs = streams * (1, 2, 2 + streams)[kinds - 1]
    fn = random(outputs, streams * width, seed=1) / (streams * width) ** 0.5
    return Mixing(fn, random(outputs, seed=2), 1 + 0.3 * random(kinds, seed=3))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("forced", [None, "torch"])
def test_it_is_what_transformers_computes(isa: str, forced: dispatch.Implementation | None) -> None:
    config = HYV4Config(hidden_size=96, hc_mult=3, hc_eps=1e-3, hc_magnitude=1.5, rms_norm_eps=1e-5)
    whole, last = HYV4HyperConnection(config), HYV4HyperHead(config)
    given, head = mixing(3, 96), mixing(3, 96, kinds=1)
    x, part = random(20, 3, 96), random(20, 96, seed=4)
    with torch.no_grad():
        for name, value in zip(Mixing._fields, given, strict=True):
            getattr(whole, name).copy_(value)
        for name, value in zip(Mixing._fields, head, strict=True):
            getattr(last, f"hc_{name}").copy_(value)
        post, out = whole(x[None])
        added = post[0][..., None] * part[:, None] + x
        left = last(x[None])[0]
    with dispatch.force(forced):
        ours, by = hyper.collect(x.flatten(1), given, 3, BOUNDS)
        assert by is not None
        spread = hyper.spread(x.flatten(1), part, by)
        end, nothing = hyper.collect(x.flatten(1), head, 3, BOUNDS)
    assert nothing is None
    for got, want in ((ours, out[0]), (by.post, post[0]), (spread, added.flatten(1)), (end, left)):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("forced", [None, "torch"])
@pytest.mark.parametrize("rounds", [1, 20])
def test_streams_mix_as_in_transformers(isa: str, rounds: int, forced: dispatch.Implementation | None) -> None:
    """And their mean."""
    config = Glm5NextTextConfig(
        hidden_size=96, hc_mult=3, hc_eps=1e-3, hc_sinkhorn_iters=rounds, rms_norm_eps=1e-5, num_hidden_layers=4
    )
    whole, given = Glm5NextTextHyperConnection(config), mixing(3, 96, kinds=3)
    x, part = random(20, 3, 96), random(20, 96, seed=4)
    with torch.no_grad():
        for name, value in zip(Mixing._fields, given, strict=True):
            getattr(whole, name).copy_(value)
        post, comb, out = whole(x[None])
        mixed = comb[0].transpose(1, 2) @ x + post[0][..., None] * part[:, None]
    with dispatch.force(forced):
        ours, by = hyper.collect(x.flatten(1), given, 3, MIXED._replace(rounds=rounds))
        assert by is not None and by.comb is not None
        spread = hyper.spread(x.flatten(1), part, by)
        mean = hyper.mean(x.flatten(1), 3)
    for got, want in (
        (ours, out[0]), (by.post, post[0]), (by.comb, comb[0]), (spread, mixed.flatten(1)), (mean, x.mean(1)),
    ):  # fmt: skip
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "width"), [(1, 64), (2, 7), (4, 100), (8, 33), (4, 2816)])
def test_matches_fp64(isa: str, dtype: torch.dtype, streams: int, width: int) -> None:
    x, given = (3 * random(9, streams * width)).to(dtype), mixing(streams, width)
    part = random(9, width, seed=5).to(dtype)
    flat = x.double()
    fn, base, scale = (each.double() for each in given)
    p = (flat @ fn.T) * (flat.square().mean(-1, keepdim=True) + BOUNDS.eps).rsqrt()
    pre = torch.sigmoid(p[:, :streams] * scale[0] + base[:streams]) + BOUNDS.least
    post = BOUNDS.magnitude * torch.sigmoid(p[:, streams:] * scale[1] + base[streams:]) + BOUNDS.least
    each = flat.view(9, streams, width)
    want = (pre[..., None] * each).sum(1)
    rtol = 2e-6 if dtype == torch.float32 else 2**-8
    for force in ("cpu", "torch"):
        with dispatch.force(force):  # type: ignore[arg-type]
            out, by = hyper.collect(x, given, streams, BOUNDS)
            assert by is not None
            spread = hyper.spread(x, part, by)
        torch.testing.assert_close(by.post.double(), post, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(out.double(), want, rtol=rtol, atol=1e-5)
        exact = each + by.post.double()[..., None] * part.double()[:, None]
        torch.testing.assert_close(spread.double(), exact.flatten(1), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forced", [None, "torch"])
@pytest.mark.parametrize("kinds", [2, 3])
@pytest.mark.parametrize(("streams", "width"), [(3, 90), (4, 512), (4, 2816)])
def test_a_row_has_the_same_bits_alone(
    isa: str,
    threads: int,
    dtype: torch.dtype,
    forced: dispatch.Implementation | None,
    kinds: int,
    streams: int,
    width: int,
) -> None:
    bounds = MIXED if kinds == 3 else BOUNDS
    x, given = random(70, streams * width).to(dtype), mixing(streams, width, kinds)
    part = random(70, width, seed=5).to(dtype)
    with dispatch.force(forced):
        out, post = hyper.collect(x, given, streams, bounds)
        assert post is not None
        spread = hyper.spread(x, part, post)
        for begin, end in ((0, 0), (0, 1), (1, 2), (69, 70), (3, 8), (1, 70), (2, 9)):
            some = x[begin:end].contiguous()
            ours, by = hyper.collect(some, given, streams, bounds)
            assert by is not None
            assert torch.equal(ours, out[begin:end]) and torch.equal(by.post, post.post[begin:end])
            assert (by.comb is None) == (kinds == 2)
            assert by.comb is None or (post.comb is not None and torch.equal(by.comb, post.comb[begin:end]))
            assert torch.equal(hyper.spread(some, part[begin:end], by), spread[begin:end])


@needs_extension
def test_what_does_not_fit_is_refused() -> None:
    x, given = random(4, 256), mixing(4, 64)
    with pytest.raises(ValueError, match="fn must be a contiguous CPU tensor"):
        hyper.collect(x, mixing(4, 32), 4, BOUNDS)
    with pytest.raises(ValueError, match="scale must be"):
        hyper.collect(x, given._replace(scale=torch.ones(4)), 4, BOUNDS)
    with pytest.raises(ValueError, match="1 to 8 streams"):
        hyper.collect(random(2, 9 * 16), mixing(9, 16), 9, BOUNDS)
    with pytest.raises(ValueError, match="x must be a contiguous CPU tensor"):
        hyper.spread(x, random(4, 32), Counts(torch.ones(4, 4)))
