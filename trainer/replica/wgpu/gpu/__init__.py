"""One GPU through Vulkan: devices, memory, recorded dispatches."""
