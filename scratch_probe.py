import torch, time, inspect
import torch.nn.functional as F
print(torch.__version__, torch.cuda.get_device_name())
print(hasattr(torch.ops.aten,'_fused_rms_norm'), hasattr(torch.ops.aten,'_fused_rms_norm_backward'))
try:
    from torch.nn.attention.varlen import varlen_attn
    print(inspect.signature(varlen_attn))
except Exception as e: print('varlen', e)
def bench(f, n=20):
    for _ in range(3): f()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.perf_counter()-t)/n*1e3
a=torch.randn(16384,2048,device='cuda',dtype=torch.bfloat16); b=torch.randn(16384,8192,device='cuda',dtype=torch.bfloat16)
print('mm bf16', bench(lambda: b.t()@a), 'mm bf16 + cast', bench(lambda: (b.t()@a).float()))
try: print('mm out fp32', bench(lambda: torch.mm(b.t(),a,out_dtype=torch.float32)))
except Exception as e: print('out_dtype', e)
from torch.nn.attention import sdpa_kernel, SDPBackend
for hd,nh,rows in ((128,16,8),(128,20,4)):
    qkv=torch.randn(rows,2048,3*nh,hd,device='cuda',dtype=torch.bfloat16,requires_grad=True)
    for name,be in (('flash',[SDPBackend.FLASH_ATTENTION]),('cudnn',[SDPBackend.CUDNN_ATTENTION]),('default',None)):
        def f():
            q,k,v=(p.transpose(1,2) for p in qkv.split(nh,dim=2))
            if be:
                with sdpa_kernel(be): o=F.scaled_dot_product_attention(q,k,v,is_causal=True)
            else: o=F.scaled_dot_product_attention(q,k,v,is_causal=True)
            return o
        o=f(); g=torch.randn_like(o.transpose(1,2)).transpose(1,2)
        def fb():
            o=f(); o.backward(g); qkv.grad=None
        print(name,'fwd',bench(f),'fwd+bwd',bench(fb), o.stride())
x=torch.randn(16384,2048,device='cuda',dtype=torch.bfloat16); w=torch.ones(2048,device='cuda',dtype=torch.bfloat16)
print('native ln', bench(lambda: torch.ops.aten.native_layer_norm(x,[2048],w,w,1e-5)))
y,m,r=torch.ops.aten.native_layer_norm(x,[2048],w,w,1e-5); print(m.dtype,m.shape)
print('native ln bwd', bench(lambda: torch.ops.aten.native_layer_norm_backward(x,x,[2048],m,r,w,w,[True,True,True])))
print('rms', bench(lambda: torch.ops.aten._fused_rms_norm(x,[2048],w,1e-5)))
y,r=torch.ops.aten._fused_rms_norm(x,[2048],w,1e-5); print(r.dtype)
print('rms bwd', bench(lambda: torch.ops.aten._fused_rms_norm_backward(x,x,[2048],r,w,[True,True])))
print('add', bench(lambda: x+x))
