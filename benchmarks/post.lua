-- wrk's request: the body from the file named by GEMM_BODY, of the media type GEMM_TYPE.
local file = assert(io.open(os.getenv("GEMM_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = os.getenv("GEMM_TYPE")
file:close()
