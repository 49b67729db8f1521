"""Our studies and measurements, and the pages made from them. In the root of a checkout: `python -m experiments.NAME`.

quality, recall      models of one size on the same tokens (quality.plan lists the runs, corpora prepares their data,
                     fla_layers has layers of another library); small models on generated tasks
results_page         fills docs/results.md, docs/results-all-runs.md and README.md from benchmarks/results: best_recipe
                     has the tables of `quality`, paper_recipe those of `gss reproduce`, plots the figures, compare the
                     statistics; page replaces the text between markers
api_page, scaling    docs/api.md; docs/scaling.md, a simulation of many GPUs (scaling_check compares two processes)
h200, beside         the whole speed table on one GPU; a single speed compared with other libraries (foreign,
                     pypi_gss, layer)
kernels, gss2_on_gpu, fp8_on_gpu     the kernels of training: errors, times, settings, whole steps
decode_on_gpu, serve_throughput      the speed of `gss generate`, `gss.decode.stream` and `gss serve`
beside_llama         decoding on a CPU compared with llama.cpp
millions, same_loss, data_speed      steps on millions of tokens; losses with and without kernels; tokenizing, batching
box, box_loops       the model in the box: trained, rounded, scored (box_texts, box_export, box_card); and against loops
measurements, ceilings, memory, parts    helpers: rows and their header, the machine's rates, peak memory, guarded parts

None of it is in the wheel.
"""
