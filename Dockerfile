# An image with all tasks, for CPUs and NVIDIA GPUs: the builds of torch that pip installs by default contain CUDA.
#   docker build -t trl-grpo-tasks .
#   docker run --rm -v "$PWD/outputs:/work/outputs" trl-grpo-tasks train brick --out outputs/demo
#   docker run --rm --gpus all -v "$PWD/outputs:/work/outputs" trl-grpo-tasks train --config brick/single_gpu
# A smaller image for CPUs takes torch's CPU build from the index that torch's own instructions name:
#   docker build --build-arg TORCH="torch==2.13.0+cpu" --build-arg TORCH_FLAGS="--index-url ..." -t trl-grpo-tasks:cpu .
FROM python:3.11-slim
# On a GPU, Triton compiles its launchers with gcc.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
ARG TORCH="" TORCH_FLAGS=""
# A CPU build, if one is asked for, satisfies the lock file except for CUDA's own packages, which are then left out.
RUN if [ -n "$TORCH" ]; then \
        pip install --no-cache-dir $TORCH_FLAGS "$TORCH" && sed -i -E '/^(torch|triton|nvidia-|cuda-)/d' requirements.lock; \
    fi && pip install --no-cache-dir -r requirements.lock
COPY trl_grpo_tasks trl_grpo_tasks
RUN pip install --no-cache-dir --no-deps .
# Runs write to /work; the user may not write anywhere else.
RUN useradd --create-home --uid 1000 user && mkdir -p /work/outputs && chown -R user /work
USER user
WORKDIR /work
ENTRYPOINT ["trl-grpo-tasks"]
CMD ["--help"]
