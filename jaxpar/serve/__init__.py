"""Inference: prefill and decode as explicit programs, a paged cache, continuous batching.

plan.py says what is served and where; cache.py is the cache on devices, pool.py who holds which
of its blocks; step.py makes the two programs, closed_form.py says what they communicate;
sampling.py chooses tokens, engine.py batches requests, reference.py is what every answer has to
equal.
"""
