"""Buckets: items that are communicated together.

Small messages waste latency and large ones waste memory. So consecutive items are
joined greedily up to a cap. The order is kept: a bucket is ready as soon as its last
item is ready.
"""

from collections.abc import Sequence

from sharding.checks import check_at_least


def plan_buckets(numels: Sequence[int], cap: int) -> tuple[tuple[int, ...], ...]:
    """Join consecutive items while their sum is at most `cap`; an item larger than
    `cap` is a bucket of its own.

    Args:
        numels: the elements of each item.
        cap: the most elements of a bucket of several items.

    Returns:
        The indices of each bucket's items; joined, they are `0 .. len(numels) - 1`.

    Raises:
        ValueError: `cap` is below 1, or a numel is negative.

    >>> plan_buckets([3, 4, 9, 1, 2], cap=8)
    ((0, 1), (2,), (3, 4))
    """
    check_at_least("plan_buckets", "cap", cap, 1)
    buckets: list[tuple[int, ...]] = []
    bucket: list[int] = []
    bucket_numel = 0
    for index, numel in enumerate(numels):
        check_at_least("plan_buckets", f"numels[{index}]", numel, 0)
        if bucket and bucket_numel + numel > cap:
            buckets.append(tuple(bucket))
            bucket, bucket_numel = [], 0
        bucket.append(index)
        bucket_numel += numel
    if bucket:
        buckets.append(tuple(bucket))
    return tuple(buckets)
