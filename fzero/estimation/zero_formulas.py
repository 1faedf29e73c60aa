"""The memory formula of the ZeRO paper, to compare with `fzero.plan`, which counts.

Letters: Ψ parameters, N ranks.
"""

from __future__ import annotations


def zero_nbytes(psi: float, num_ranks: int, stage: int, *, optimizer: int = 12) -> float:
    """Bytes of model state on a rank, by ZeRO §3 (figure 1, table 1).

    Args:
        psi: parameters Ψ, of 2 bytes each, like their gradients.
        optimizer: K, the bytes of master and optimizer state per parameter; 12 is Adam
            with an fp32 master.

    >>> [round(zero_nbytes(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    num_shards = [num_ranks if stage >= divided_from else 1 for divided_from in (3, 2, 1)]
    return sum(
        nbytes * psi / num for nbytes, num in zip((2, 2, optimizer), num_shards, strict=True)
    )
