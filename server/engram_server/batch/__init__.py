"""Batch inference: the answers of several tasks for a whole corpus of images, without HTTP.

sources     what to read: keys in a stable order, and a function that reads one
decoding    one image of a source to pixels, or the reason why not
tasks       tasks from a store or from bundle files, checked as the server does
passing     one batch of pixels to answers, on one device
rows        answers to rows, and the columns of the output
output      part files and the manifest; finished parts are skipped
pipeline    decode ahead, run batches on all devices, write parts in order
summary     counts over all rows
"""
