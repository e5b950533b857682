"""FastAPI with the product in the request handler."""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI, Request, Response

N = 256
app = FastAPI()


@app.post("/gemm")
async def gemm(request: Request) -> Response:
    body = bytearray(await request.body())
    both = torch.frombuffer(body, dtype=torch.float32).reshape(2, N, N)
    return Response((both[0] @ both[1]).numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False
    )
