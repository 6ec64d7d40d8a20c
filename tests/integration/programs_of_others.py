"""Training programs in the forms of other projects: with their own loops, and with tp's lines in these.

Models, losses, optimizers and averages are the same in both. A program returns weights and losses by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["PROGRAMS", "Program"]

SAMPLES, BATCH_SIZE = 16, 4


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        own: Trains by its own loop.
        ported: Trains by a trainer's lines in the loop.
        needs: The libraries whose parts it has.
        within: How far numbers may differ, relative to the largest of a tensor.
        precision: The trainer's precision.
        refused: For a backend the sentence that refuses the program.
        named: For a backend the beginning of a line that names what differs.
    """

    own: Callable
    ported: Callable
    needs: tuple = ()
    within: float = 1e-9
    precision: str = "fp32"
    refused: dict = field(default_factory=dict)
    named: dict = field(default_factory=dict)


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loader_of(*tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH_SIZE)


def classes(count=3):
    return torch.arange(SAMPLES) % count


def perceptron(*widths, seed=1):
    torch.manual_seed(seed)
    layers = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1]).double()


def numbers(states, losses):
    found = {f"{i}: {name}": t for i, state in enumerate(states) for name, t in state.items()}
    return {n: t.detach().double().clone() for n, t in found.items()} | {
        "losses": torch.stack(losses).double()
    }


# -- SAM, as in davda54/sam: the weights are put back through `data` -------------------------------


class SAM(torch.optim.Optimizer):
    """Steps a base optimizer by the gradients at the sharpest point nearby."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def _grad_norm(self):
        norms = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


def sam_parts():
    model = perceptron(4, 8, 3)
    return model, loader_of(drawn(SAMPLES, 4), classes()), {"rho": 0.5, "lr": 0.1, "momentum": 0.9}


def sam_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def sam():
    model, loader, options = sam_parts()
    optimizer, losses = SAM(model.parameters(), SGD, **options), []
    for _ in range(2):
        for batch in loader:
            loss = sam_step(model, batch)
            loss.backward()
            optimizer.first_step()
            sam_step(model, batch).backward()
            optimizer.second_step()
            losses.append(loss.detach())
    return numbers([model.state_dict()], losses)


def sam_ported(trainer):
    model, loader, options = sam_parts()
    model, loader = trainer.prepare(model, loader)
    optimizer, losses = SAM(model.parameters(), SGD, **options), []
    for _ in range(2):
        for batch in loader:
            loss = trainer.run(sam_step, model, batch)
            trainer.backward(loss)
            optimizer.first_step()
            trainer.backward(trainer.run(sam_step, model, batch))
            optimizer.second_step()
            losses.append(trainer.global_loss(loss))
    return numbers([trainer.session.model_state(model)], losses)


# -- MoCo, as in facebookresearch/moco: forward moves a frozen encoder and fills a queue ------------


class MoCo(nn.Module):
    """A query encoder, a key encoder that follows it, and a queue of keys."""

    def __init__(self, dim=4, size=16, momentum=0.9, temperature=0.2):
        super().__init__()
        self.momentum, self.temperature, self.size = momentum, temperature, size
        self.encoder_q, self.encoder_k = perceptron(6, 8, dim), perceptron(6, 8, dim)
        self.encoder_k.requires_grad_(requires_grad=False)
        self.register_buffer("queue", F.normalize(drawn(dim, size, seed=3), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self.concat_all_gather = lambda rows: rows

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        pairs = zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)
        for param_q, param_k in pairs:
            param_k.data = param_k.data * self.momentum + param_q.data * (1.0 - self.momentum)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = self.concat_all_gather(keys)
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.queue_ptr[0] = (pointer + len(keys)) % self.size

    def forward(self, im_q, im_k):
        query = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            key = F.normalize(self.encoder_k(im_k), dim=1)
        positive = (query * key).sum(1, keepdim=True)
        negative = query @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        self._dequeue_and_enqueue(key)
        return logits, torch.zeros(len(logits), dtype=torch.long)


def moco_parts():
    x = drawn(SAMPLES, 6)
    return MoCo(), loader_of(x, x + 0.1 * drawn(SAMPLES, 6, seed=2)), {"lr": 0.2, "momentum": 0.9}


def moco_step(model, batch):
    output, target = model(im_q=batch[0], im_k=batch[1])
    return F.cross_entropy(output, target)


def moco():
    model, loader, options = moco_parts()
    optimizer, losses = SGD(model.encoder_q.parameters(), **options), []
    for _ in range(2):
        for batch in loader:
            loss = moco_step(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return numbers([model.state_dict()], losses)


def moco_ported(trainer):
    model, loader, options = moco_parts()
    model.concat_all_gather = trainer.all_gather
    model, loader = trainer.prepare(model, loader)
    inner = trainer.session.unwrap(model)
    optimizer, losses = SGD(inner.encoder_q.parameters(), **options), []
    for _ in range(2):
        for batch in loader:
            loss = trainer.run(moco_step, model, batch)
            optimizer.zero_grad()
            trainer.backward(loss)
            optimizer.step()
            losses.append(trainer.global_loss(loss))
    return numbers([trainer.session.model_state(model)], losses)


# -- DINO, as in facebookresearch/dino: a teacher moved through `data`, a center kept by the loss ---


class DINOLoss(nn.Module):
    """The cross-entropy of a student's views to a teacher's, with a running center of the latter."""

    def __init__(self, dim, crops, concat_all_gather=lambda rows: rows):
        super().__init__()
        self.crops, self.concat_all_gather = crops, concat_all_gather
        self.register_buffer("center", torch.zeros(1, dim, dtype=torch.float64))

    def forward(self, student_output, teacher_output):
        student_out = (student_output / 0.1).chunk(self.crops)
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                total_loss += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                n_loss_terms += 1
        self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = self.concat_all_gather(teacher_output).mean(0, keepdim=True)
        self.center = self.center * 0.9 + batch_center * 0.1


def clip_gradients(model, clip):
    for p in model.parameters():
        if p.grad is not None:
            clip_coef = clip / (p.grad.data.norm(2) + 1e-6)
            if clip_coef < 1:
                p.grad.data.mul_(clip_coef)


def cancel_gradients_last_layer(epoch, model):
    for n, p in model.named_parameters():
        if epoch < 1 and n.startswith("2."):
            p.grad = None


@torch.no_grad()
def move_teacher(student, teacher, m=0.9):
    for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
        param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)


def dino_parts():
    student, teacher = perceptron(6, 8, 5), perceptron(6, 8, 5, seed=2)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(requires_grad=False)
    x = drawn(SAMPLES, 6)
    views = [x + 0.1 * drawn(SAMPLES, 6, seed=seed) for seed in range(4)]
    return student, teacher, loader_of(*views)


def dino():
    student, teacher, loader = dino_parts()
    dino_loss, losses = DINOLoss(5, 4), []
    optimizer = AdamW(student.parameters(), lr=0.01)
    for epoch in range(2):
        for it, images in enumerate(loader):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + it)
            teacher_output = teacher(torch.cat(images[:2]))
            loss = dino_loss(student(torch.cat(images)), teacher_output)
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(student, 0.1)
            cancel_gradients_last_layer(epoch, student)
            optimizer.step()
            move_teacher(student, teacher)
            losses.append(loss.detach())
    return numbers([student.state_dict(), teacher.state_dict(), dino_loss.state_dict()], losses)


def dino_ported(trainer):
    student, teacher, loader = dino_parts()
    dino_loss, losses = DINOLoss(5, 4, trainer.all_gather), []
    student, teacher, loader = trainer.prepare(student, teacher, loader)
    optimizer = AdamW(student.parameters(), lr=0.01)

    def step(student, teacher, images):
        teacher_output = teacher(torch.cat(images[:2]))
        return dino_loss(student(torch.cat(images)), teacher_output)

    plain = trainer.session.unwrap(student)
    for epoch in range(2):
        for it, images in enumerate(loader):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + it)
            loss = trainer.run(step, student, teacher, images)
            optimizer.zero_grad()
            trainer.backward(loss)
            clip_gradients(plain, 0.1)
            cancel_gradients_last_layer(epoch, plain)
            optimizer.step()
            move_teacher(student, teacher)
            losses.append(trainer.global_loss(loss))
    states = [trainer.session.model_state(model) for model in (student, teacher)]
    return numbers([*states, dino_loss.state_dict()], losses)


# -- A GAN in half precision, as in pytorch/examples/dcgan with torch.amp ---------------------------


def gan_parts():
    generator, discriminator = perceptron(4, 16, 6).float(), perceptron(6, 16, 1, seed=2).float()
    batches = loader_of(drawn(SAMPLES, 6).float(), drawn(SAMPLES, 4, seed=2).float())
    optimizers = [Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.999)) for m in (generator, discriminator)]
    return generator, discriminator, batches, optimizers


def discriminator_step(net_d, net_g, batch):
    real, noise = batch
    fake = net_g(noise)
    ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
    loss = F.binary_cross_entropy_with_logits
    return loss(net_d(real).flatten().float(), ones) + loss(net_d(fake.detach()).flatten().float(), zeros)


def generator_step(net_g, net_d, batch):
    output = net_d(net_g(batch[1])).flatten().float()
    return F.binary_cross_entropy_with_logits(output, torch.ones(len(output)))


def gan():
    net_g, net_d, loader, (optimizer_g, optimizer_d) = gan_parts()
    scaler, losses = torch.amp.GradScaler("cpu"), []
    for _ in range(2):
        for batch in loader:
            net_d.zero_grad()
            with torch.autocast("cpu", torch.float16):
                err_d = discriminator_step(net_d, net_g, batch)
            scaler.scale(err_d).backward()
            scaler.step(optimizer_d)
            net_g.zero_grad()
            with torch.autocast("cpu", torch.float16):
                err_g = generator_step(net_g, net_d, batch)
            scaler.scale(err_g).backward()
            scaler.step(optimizer_g)
            scaler.update()
            losses += [err_d.detach(), err_g.detach()]
    return numbers([net_g.state_dict(), net_d.state_dict()], losses)


def gan_ported(trainer):
    net_g, net_d, loader, _ = gan_parts()
    net_g, net_d, loader = trainer.prepare(net_g, net_d, loader)
    optimizer_g, optimizer_d = (Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.999)) for m in (net_g, net_d))
    losses = []
    for _ in range(2):
        for batch in loader:
            optimizer_d.zero_grad()
            err_d = trainer.run(discriminator_step, net_d, net_g, batch)
            trainer.backward(err_d)
            trainer.update(net_d, optimizer_d)
            optimizer_g.zero_grad()
            err_g = trainer.run(generator_step, net_g, net_d, batch)
            trainer.backward(err_g)
            trainer.update(net_g, optimizer_g)
            losses += [trainer.global_loss(err_d), trainer.global_loss(err_g)]
    return numbers([trainer.session.model_state(net_g), trainer.session.model_state(net_d)], losses)


# -- torchvision, and what imports it -----------------------------------------------------------------

_OPERATORS = []
"""Definitions of operators, which end with their objects."""


def import_torchvision():
    """Import torchvision, also where its build is one for CUDA beside torch for CPUs.

    It has no operators then, and asks for two of them while it is imported. Training needs none.
    """
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)
        import torchvision  # noqa: F401


# -- timm's train.py: adaptive clipping, ModelEmaV3, groups without weight decay ---------------------


def timm_parts():
    import_torchvision()
    import timm
    from timm.optim import param_groups_weight_decay

    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3
    ).double()

    def make_optimizer(model):
        groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
        return AdamW(groups, lr=1e-2)

    return model, loader_of(drawn(SAMPLES, 3, 8, 8), classes()), make_optimizer


def timm_average(model):
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=0.8, use_warmup=True, foreach=False)


def timm_clip(model):
    from timm.models import model_parameters
    from timm.utils import dispatch_clip_grad

    dispatch_clip_grad(model_parameters(model, exclude_head=True), value=0.02, mode="agc")


def timm_program():
    model, loader, make_optimizer = timm_parts()
    optimizer, model_ema, losses = make_optimizer(model), timm_average(model), []
    for _ in range(2):
        for batch in loader:
            loss = sam_step(model, batch)
            loss.backward()
            timm_clip(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            model_ema.update(model, step=len(losses))
    return numbers([model.state_dict(), model_ema.module.state_dict()], losses)


def timm_ported(trainer):
    model, loader, make_optimizer = timm_parts()
    model, loader = trainer.prepare(model, loader)
    plain = trainer.session.unwrap(model)
    optimizer, model_ema, losses = make_optimizer(plain), timm_average(plain), []
    for _ in range(2):
        for batch in loader:
            loss = trainer.run(sam_step, model, batch)
            trainer.backward(loss)
            timm_clip(plain)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(trainer.global_loss(loss))
            model_ema.update(plain, step=len(losses))
    average = trainer.session.model_state(model_ema.module)
    return numbers([trainer.session.model_state(model), average], losses)


# -- torchvision's references/detection: lists of images and of targets, a warm-up of the rate ------


class Boxes(torch.utils.data.Dataset):
    """Images, each with as many boxes as no other."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        count = 1 + i % 3
        corners = drawn(count, 2, seed=i).sigmoid() * 16
        boxes = torch.cat([corners, corners + 8 + drawn(count, 2, seed=100 + i).sigmoid() * 6], 1)
        return drawn(3, 32, 32, seed=i).sigmoid(), {"boxes": boxes, "labels": 1 + torch.arange(count) % 2}


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


def detection_parts():
    import_torchvision()
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.GroupNorm(2, 8), nn.ReLU())
    backbone.out_channels = 8
    anchors = AnchorGenerator(sizes=((8, 16),), aspect_ratios=((0.5, 1.0),))
    model = RetinaNet(backbone, 3, min_size=32, max_size=32, anchor_generator=anchors).double()
    return model, DataLoader(Boxes(), batch_size=BATCH_SIZE, collate_fn=collate_fn)


def detection_optimizer(model, steps):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=steps)
    return optimizer, warm_up


def detection_step(model, batch):
    images, targets = batch
    loss_dict = model(list(images), [dict(target) for target in targets])
    return sum(loss for loss in loss_dict.values())


def detection():
    model, loader = detection_parts()
    optimizer, warm_up = detection_optimizer(model, len(loader))
    losses = []
    for batch in loader:
        loss = detection_step(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(loss.detach())
    return numbers([model.state_dict()], losses)


def detection_ported(trainer):
    model, loader = detection_parts()
    model, loader = trainer.prepare(model, loader)
    optimizer, warm_up = detection_optimizer(model, len(loader))
    losses = []
    for batch in loader:
        loss = trainer.run(detection_step, model, batch)
        optimizer.zero_grad()
        trainer.backward(loss)
        optimizer.step()
        warm_up.step()
        losses.append(trainer.global_loss(loss))
    return numbers([trainer.session.model_state(model)], losses)


PROGRAMS = {
    "SAM": Program(sam, sam_ported, refused={"fsdp": "the data of the parameter '0.weight' was replaced"}),
    "MoCo": Program(
        moco,
        moco_ported,
        refused={
            "dp-gather": "all_gather() was called within the model's forward",
            "fsdp": "the forward pass wrote the parameter 'encoder_k.0.weight'",
        },
        named={"tuple": "forward, or the step, writes the parameter 'encoder_k.0.weight'"},
    ),
    "DINO": Program(dino, dino_ported, named={"tuple": "the step changes 'dino_loss'"}),
    "GAN": Program(gan, gan_ported, precision="fp16-mixed", within=1e-2),
    "timm": Program(
        timm_program,
        timm_ported,
        needs=("timm", "torchvision"),
        refused={"fsdp": "a fully sharded model cannot be copied"},
    ),
    "detection": Program(
        detection,
        detection_ported,
        needs=("torchvision",),
        refused={"dp-gather": "'images' is a list, and no tensors are outside of it"},
    ),
}
