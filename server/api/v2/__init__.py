"""`/v2`: the Open Inference Protocol, for the tools that speak it already (KServe, Triton).

docs/open-inference.md says what every part means here.
"""
