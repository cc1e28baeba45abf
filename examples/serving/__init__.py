"""A server with continuous batching over this library's plans, as small as one can be read.

    python -m examples.serving --model tiny          # then POST to http://127.0.0.1:8000/v1/completions
    python -m examples.serving.load --requests 10000

| file | what it decides |
|---|---|
| request | what a request is, and what there is room for |
| pages, prefix | who holds a page of the cache, and whose keys can be found again |
| scheduler | who is admitted, what runs in the next step, who leaves |
| model | a random transformer, one row a token |
| inputs, attention, runner | a step as static tensors, the plans that read them, one CUDA graph |
| stand_in | attention for a machine without a GPU |
| engine | steps, and requests that come in between |
| protocol, metrics, web | JSON, Prometheus, HTTP |
| build, __main__ | options, and the command |
| load | the load test |
"""
