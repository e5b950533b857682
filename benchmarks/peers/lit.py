"""LitServe; it reads JSON (or forms) alone, so the matrices travel as base64 in JSON, both ways."""

from __future__ import annotations

import base64
import sys

import litserve
import torch

N = 256


class Gemm(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, str]) -> torch.Tensor:
        data = bytearray(base64.b64decode(request["both"]))
        return torch.frombuffer(data, dtype=torch.float32).reshape(2, N, N)

    def predict(self, both: torch.Tensor) -> torch.Tensor:
        return both[0] @ both[1]

    def encode_response(self, d: torch.Tensor) -> dict[str, str]:
        return {"d": base64.b64encode(d.numpy().tobytes()).decode()}


if __name__ == "__main__":
    server = litserve.LitServer(Gemm(api_path="/gemm"), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
