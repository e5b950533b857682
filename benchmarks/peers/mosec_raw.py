"""mosec with raw bodies both ways."""

from __future__ import annotations

import torch
from mosec import Server, Worker

N = 256


class Gemm(Worker):
    resp_mime_type = "application/octet-stream"

    def deserialize(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(2, N, N)

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return both[0] @ both[1]

    def serialize(self, d: torch.Tensor) -> bytes:
        return d.numpy().tobytes()


if __name__ == "__main__":
    server = Server()
    server.append_worker(Gemm, num=1)
    server.run()
