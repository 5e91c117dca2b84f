# Trains the English-German demo on a CPU, or serves a model (see docs/serving.md):
#   docker build --tag metaphrase .
#   mkdir -p runs    # else docker makes it, and only root may write there
#   docker run --rm --volume "$PWD/runs:/home/user/runs" metaphrase
FROM python:3.11-slim

# The build of torch for CPUs is a tenth of the size of the one for GPUs.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_ROOT_USER_ACTION=ignore

COPY . /opt/metaphrase
RUN pip install --no-cache-dir --constraint /opt/metaphrase/constraints.txt "/opt/metaphrase[serve,ctranslate2]" \
    && useradd --create-home --uid 1000 user \
    && install --directory --owner=user /home/user/runs

USER 1000
WORKDIR /home/user
EXPOSE 8000
ENTRYPOINT ["metaphrase"]
CMD ["demo"]
