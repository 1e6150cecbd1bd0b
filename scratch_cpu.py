import torch, time, cProfile, pstats, fourfold as ff
torch.set_num_threads(1)
g=ff.Grid(); cfg=ff.models.config("gpt-tiny",layers=12)
m=ff.models.build(cfg,g); o=ff.optim.AdamW(m,lr=1e-3)
t=torch.arange(16).view(1,16)
def step():
    l=m(t,t); l.backward(); o.clip_and_step(1.0); o.zero_grad()
for _ in range(5): step()
def timeit(f,n=20):
    t0=time.perf_counter()
    for _ in range(n): f()
    return (time.perf_counter()-t0)/n*1e3
print("step ms", timeit(step))
with torch.no_grad(): print("fwd nograd", timeit(lambda: m(t,t)))
def fb():
    l=m(t,t); t1=time.perf_counter(); l.backward(); return
print("fwd+bwd", timeit(lambda:(m(t,t).backward(), o.zero_grad())))
p=cProfile.Profile(); p.enable()
for _ in range(10): step()
p.disable()
s=pstats.Stats(p); s.sort_stats("tottime").print_stats(32)
