"""The engine: admission, queue, one worker thread per device, context cache, tasks. No HTTP."""
