"""LitServe with raw bodies both ways."""

from __future__ import annotations

import sys

import litserve
import torch
from fastapi import Request, Response

N = 256


class Gemm(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    async def decode_request(self, request: Request) -> torch.Tensor:
        return torch.frombuffer(bytearray(await request.body()), dtype=torch.float32).reshape(2, N, N)

    def predict(self, both: torch.Tensor) -> torch.Tensor:
        return both[0] @ both[1]

    def encode_response(self, d: torch.Tensor) -> Response:
        return Response(d.numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    server = litserve.LitServer(Gemm(api_path="/gemm"), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
