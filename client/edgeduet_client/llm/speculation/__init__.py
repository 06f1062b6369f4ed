"""Speculative decoding: several drafters propose, the target verifies, a selector picks whoever pays most.

The answer's law does not depend on drafters or selector; the verifier alone sees to that (:mod:`.verify`).
"""
