import random, pytest, torch, time
from tests.interpreter.test_orders import check
from tests.support import block_mask, inputs
from flexattn.space.config import ORDERS
from flexattn import create_block_mask
@pytest.mark.parametrize("seed", range(60))
def test_zz(seed):
    r=random.Random(seed)
    B=r.choice([1,2,3]); Hkv=r.choice([1,2,3]); g=r.choice([1,2,3,5]); Hq=Hkv*g
    L=r.choice([1,5,17,33,50]); S=r.choice([3,16,31,70])
    kind=r.choice(["prefill","decode"])
    q,k,v=inputs(B,Hq,Hkv,L,S)
    if r.random()<.3: k,v=k[:1],v[:1]
    if r.random()<.3: q=q[:1].expand(B,-1,-1,-1)
    off=r.choice([-3,0,4])
    small=torch.randn(200); hb=torch.randn(Hq,200); edge=torch.randn(L); bm=torch.rand(B,Hq)
    def score(s,b,h,qi,ki): return s+small[ki-qi+off]+hb[h,ki*2]*0.5+small[ki]+(edge[qi-ki] if which=="plain" and off==0 else 0)
    which=r.choice(["none","head","plain","tab"]); lens=torch.randint(0,S+1,(B,Hq))
    pass
    tab=torch.rand(L,S)>0.4
    def mm(b,h,qi,ki):
        if which=="head": return (ki<lens[b,h])
        if which=="tab": return tab[qi,ki]|(ki<=qi)
        return ki<=qi+off
    blk=r.choice([(16,16),(24,40),(128,128),(7,33),(48,16)])
    mask=None
    if which!="none":
        mask=create_block_mask(mm, B if which=="head" else None, Hq if which=="head" else None, L,S,"cpu",BLOCK_SIZE=blk, separate_full_blocks=r.random()<.7)
    fields={}
    if kind=="prefill": fields.update(order=r.choice(ORDERS[1:]))
    else: fields.update(num_splits=r.choice([1,2,3,7]))
    fields.update(early_loads=r.choice([True,False]),BLOCK_M=16,BLOCK_N=16)
    check(q,k,v,kind,r.choice([None,score]),mask,**fields)
