"""The peers' servers: the same product, raw fp32 bodies A‖B of 256³, written as their documentation has it."""
