"""The prompts of `headway bench engine`, for the peers: token ids that share no beginning, so nothing is cached."""


def ids(length, vocab_size, request):
    """The first measured request is number 0."""
    seed = 1_000_003 + request
    return [(seed * 7919 + t * 104_729 + 17) % vocab_size for t in range(length)]
