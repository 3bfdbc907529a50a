"""The engine: admission, queue, one worker thread per device, context cache, task bank. No HTTP."""
