-- wrk's request: the body from the file named by GEMM_BODY, as application/octet-stream.
local file = assert(io.open(os.getenv("GEMM_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = "application/octet-stream"
file:close()
