"""Ring pass-KV or ring pass-Q by rule: Algorithms 1 and 5 and the empirical model of context parallelism.

arXiv 2411.01783, equations 1, 2 and 5, Algorithms 1 and 5, appendix D. T new tokens on P cached ones, N ranks.
`flops_s` and `bandwidth_bytes_s` must be of the same scope: both of one device, or both of a whole rank. Rules give
"ring-kv" or "ring-q".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.planner.machine import Machine, ModelShape


class RingRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules know: ranks N, attention's heads, attained operations a second and bytes a second of a link.
    sent_vectors: of a token and KV head, a key and a value, where the paper's equations have two."""

    ranks: int
    heads: int
    kv_heads: int
    flops_s: float
    bandwidth_bytes_s: float
    element_bytes: int = 2
    sent_vectors: int = 2

    @classmethod
    def of(cls, machine: Machine, shape: ModelShape, ranks: int) -> RingRates:
        """From the measured profile: the attention's rate at many rows."""
        return cls(
            ranks=ranks,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            flops_s=machine.attention_flops_s[-1][1],
            bandwidth_bytes_s=machine.link_bytes_s,
            element_bytes=shape.element_bytes,
            sent_vectors=shape.sent_vectors,
        )

    @property
    def ratio(self) -> float:
        """Equation 1: Q is smaller than K and V where T / (T + P) is at most this, 2 N_KV / N_H."""
        return self.sent_vectors * self.kv_heads / self.heads

    @property
    def hides_kv(self) -> float:
        """Equation 2: new tokens from which the attention hides the transfer of K and V."""
        sent = self.sent_vectors * self.kv_heads * self.element_bytes
        return self.ranks * self.flops_s * sent / (4 * self.heads * self.bandwidth_bytes_s)

    def ratio_with_all_to_all(self, T: int) -> float:
        """Equation 5: pass-Q gains only where T / (T + P) is below this; the states' way home is counted."""
        return self.ratio - 4 * T * self.bandwidth_bytes_s / (self.ranks * self.flops_s * self.element_bytes)


def algorithm1(ring: RingRates, T: int, P: int) -> str:
    """Pass-KV where its transfer is hidden or K and V are no larger than Q; the way home of states is not counted."""
    return "ring-kv" if ring.hides_kv <= T or ring.ratio <= T / (T + P) else "ring-q"


def algorithm5(ring: RingRates, T: int, P: int) -> str:
    """Algorithm 1 with the all-to-all of the states counted against pass-Q."""
    return "ring-kv" if ring.hides_kv <= T or ring.ratio_with_all_to_all(T) <= T / (T + P) else "ring-q"


class Heuristic(msgspec.Struct, frozen=True):
    """h(T, P) = alpha log T + beta log(T / (T + P)) + gamma, natural logarithms; above 0: pass-KV (appendix D).

    The coefficients are one machine's: the printed ones contradict the paper's own table 4 and its statement that a
    full prefill is pass-KV. Fit them here (`fit_heuristic`), and use the result guarded (`guarded`).
    """

    alpha: float
    beta: float
    gamma: float

    def h(self, T: int, P: int) -> float:
        return self.alpha * math.log(T) + self.beta * math.log(T / (T + P)) + self.gamma


RIDGE = 1e-4
"""Of the fit. Where samples separate and few lie on one side, ten times as much misjudges times that are 8% apart."""


def guarded(ring: RingRates, heuristic: Heuristic, T: int, P: int) -> str:
    """h under the guard of Algorithm 1: where that says pass-KV, and in a full prefill, it is; else h decides."""
    if P == 0 or algorithm1(ring, T, P) == "ring-kv" or heuristic.h(T, P) > 0:
        return "ring-kv"
    return "ring-q"


def fit_heuristic(samples: Sequence[tuple[int, int, float, float]]) -> Heuristic:
    """Coefficients of h from measurements (T, P, seconds of ring-kv, seconds of ring-q).

    Logistic regression of which was faster, each sample weighted by |log(q/kv)|, so that ties count for little; a
    small ridge keeps the coefficients finite where the samples separate. Raises ValueError for fewer than three
    samples with P > 0, or times that are not positive.
    """
    used = [sample for sample in samples if sample[1] > 0]
    if len(used) < 3 or any(T < 1 or not kv > 0 or not q > 0 for T, _, kv, q in used):
        raise ValueError(f"h(T, P) needs three or more samples of T, P > 0 and positive times, got {len(used)}")
    T, P, kv, q = np.array(used, dtype=np.float64).T
    raw = np.stack([np.log(T), np.log(T / (T + P))], axis=1)
    centre, scale = raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-9)
    x = np.concatenate([(raw - centre) / scale, np.ones((len(raw), 1))], axis=1)
    gain = np.log(q / kv)
    alpha, beta, shift = _logistic(x, gain > 0, np.abs(gain) / max(float(np.abs(gain).mean()), 1e-12))
    alpha, beta = alpha / scale[0], beta / scale[1]
    return Heuristic(float(alpha), float(beta), float(shift - alpha * centre[0] - beta * centre[1]))


def _logistic(x: np.ndarray, positive: np.ndarray, weight: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
    """Newton's method with halved steps for the weighted, ridged logistic loss; x [n, 3] -> coefficients [3]."""

    def loss(w: np.ndarray) -> float:
        return float(weight @ np.logaddexp(0, np.where(positive, -1, 1) * (x @ w)) + ridge / 2 * w @ w)

    w = np.zeros(x.shape[1])
    for _ in range(100):
        p = 0.5 * (1 + np.tanh(x @ w / 2))
        gradient = x.T @ (weight * (p - positive)) + ridge * w
        step = np.linalg.solve((x.T * (weight * p * (1 - p))) @ x + ridge * np.eye(len(w)), gradient)
        while np.abs(step).max() > 1e-9 and loss(w - step) > loss(w):
            step = step / 2
        w = w - step
        if np.abs(step).max() <= 1e-9:
            break
    return w
