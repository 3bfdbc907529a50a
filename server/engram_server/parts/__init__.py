"""Part files of a corpus: rows of answers, and what the backbone computed.

arrow       pyarrow, which is optional
columns     columns of rows, with those of every image
output      part files of rows and the manifest; finished parts are skipped
kept        folders of embeddings, summaries or contexts: reading them
keeping     writing them
search      nearest images by their embeddings
"""
