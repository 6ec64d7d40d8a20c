"""A ResNet-50 without normalization: many modules and parameters, and no buffers."""

from torch import Tensor, nn

__all__ = ["resnet50"]


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inner, 4 * width, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:  # (batch, inner, height, width)
        y = self.conv3(self.relu(self.conv2(self.relu(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet50() -> nn.Module:
    """Return the network of He et al. (2015), table 1, without its BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inner = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        row = []
        for block in range(blocks):
            row.append(Bottleneck(inner, width, 2 if stage and not block else 1))
            inner = 4 * width
        layers.append(nn.Sequential(*row))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))
