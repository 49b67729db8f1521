"""Our own studies and the pages they make: run from the root of a checkout as `python -m experiments.NAME`.

results_page         tables, answers and figures of docs/results.md and README.md, from benchmarks/results/reproduce
study, side_by_side  one study's runs within a given time, and their results; many on one GPU (tables.plan lists all)
beside, h200         ours beside other libraries (foreign, pypi_gss) on any machine; the whole speed table on one GPU
layer, data_speed    one GSS layer forward and backward; tokenizing, batching; memory has peaks, in a process each
kernels, same_loss, serve_throughput, cpu_training     what docs/performance.md and serving.md state
quality              models of one size on the same tokens beside a Llama (quality.plan lists them; fla_layers: peers)
millions             one exact optimizer step on a sequence of millions of tokens
gss2_on_gpu, decode_on_gpu     GSS2's kernels, and what `gss generate` gives, on a GPU; beside_llama: decoding on a CPU
scaling              what many GPUs would do, simulated; scaling_check holds that against two processes
box                  the model in the box: trained, rounded, scored, with its card
tabulate, compare    helpers: result files as tables; perplexities of two systems compared document by document

None of it is in the wheel.
"""
