# nanoGPT's train.py with laconic in place of DDP; 12 lines change.
#
#   sed -f nanogpt.sed train.py > train_laconic.py
#   torchrun --nproc_per_node=4 train_laconic.py
#
# A script and not a patch, because it finds its places by what stands there, in whichever version you have.

/^import torch$/a\
import laconic

/^    model = DDP(/c\
    session = laconic.attach(model, optimizer, "diloco(period=64)")

/^raw_model = /c\
raw_model = model

/require_backward_grad_sync = /c\
            accumulating = session.accumulate(micro_step < gradient_accumulation_steps - 1)

/(loss)\.backward()/{
i\
        with accumulating if ddp else nullcontext():
s/^/    /
}

/^    destroy_process_group()/i\
    session.average()\
    session.detach()
