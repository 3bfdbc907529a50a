"""`/v2`: the Open Inference Protocol, for tools such as KServe and Triton clients.

docs/reference/open-inference.md documents it.
"""
