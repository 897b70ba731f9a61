"""Counts the hooks that an inspection has put on a model."""


def hooks_on(model):
    """How many hooks there are, without those that transformers itself puts on at a model's first call and leaves."""
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return sum(not hook.__module__.startswith("transformers.") for hook in hooks)
