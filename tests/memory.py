"""How much memory a piece of CPU work takes at its peak."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work):
    """(result of work(), largest sum of CPU tensors that it held at a time): temporaries inside torch's operators count.

    From the profiler's record of every allocation; the process's own peak would include what Python and malloc keep.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak
