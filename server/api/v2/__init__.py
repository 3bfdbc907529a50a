"""`/v2`: the Open Inference Protocol, for the tools that speak it already (KServe, Triton).

docs/reference/open-inference.md says what every part means here.
"""
