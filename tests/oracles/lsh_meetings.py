"""Which tokens meet in LSH attention, one token after the other: short enough to follow with a pencil."""

from collections import Counter

__all__ = ["meetings"]


def meetings(
    rounds: list[list[int]], chunk: int, before: int, after: int, ring: bool, within_bucket: bool
) -> list[Counter]:
    """For every position, how often its windows hold each key; ``rounds`` are the buckets of one head, a list a round."""
    t = len(rounds[0])
    chunks: list[list[tuple[int, int]]] = []  # (round, position) of every chunk, round after round
    place: list[dict[int, int]] = []  # the chunk of every position, by round
    first: list[int] = []
    for s, numbers in enumerate(rounds):
        order = [n for _, n in sorted(zip(numbers, range(t), strict=True))]
        first.append(len(chunks))
        place.append({n: len(chunks) + m // chunk for m, n in enumerate(order)})
        chunks += [[(s, n) for n in order[m : m + chunk]] for m in range(0, t, chunk)]
    ends = [*first[1:], len(chunks)]
    meets: list[Counter] = [Counter() for _ in range(t)]
    for s, numbers in enumerate(rounds):
        for i in range(t):
            own = place[s][i]
            for n in range(own - before, own + after + 1):
                if not ring and not first[s] <= n < ends[s]:
                    continue
                for r, j in chunks[n % len(chunks)]:
                    if not within_bucket or (r == s and numbers[i] == numbers[j]):
                        meets[i][j] += 1
    return meets
