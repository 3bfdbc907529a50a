"""Batch inference: the answers of several tasks for a whole corpus of images, without HTTP.

sources     what to read: keys in a stable order, and a function that reads one
decoding    one image of a source to pixels, or the reason why not
images      batches of photos, or of what was kept of them, read ahead
tasks       tasks from a store or from bundle files, checked as the server does
passing     one batch to answers, on one device
rows        answers to rows, and the columns of the tasks
pipeline    read ahead, run batches on all devices, write parts in order
summary     counts over all rows
run         all of it, from options to a summary
"""
