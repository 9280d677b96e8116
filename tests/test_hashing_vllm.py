# SPDX-License-Identifier: Apache-2.0
"""The same bytes as vLLM 0.32: recorded digests, and vLLM itself where it is installed.

LAST_HASHES was recorded with vLLM 0.32.0, Python 3.11, cbor2 6.3, xxhash 4.1:

    PYTHONPATH=. python tests/test_hashing_vllm.py

in an environment with vLLM prints the table anew.
"""

import random

import pytest

from cpool.hashing import ALGORITHMS, BlockHasher, hash_tokens

SEED = "a shared seed"  # what PYTHONHASHSEED would be
LORA = ("lora", "sql-adapter", "/adapters/sql")
IMAGE = "9f" * 32


def random_ids(count: int, bits: int) -> list[int]:
    rng = random.Random(bits)
    return [rng.randrange(1 << rng.randint(1, bits)) for _ in range(count)]


# name: (token ids, block size, one entry of extra keys per block or None)
CASES = {
    "one token a block": (random_ids(9, 18), 1, None),
    "two tokens a block": (random_ids(9, 18), 2, None),
    "three tokens a block": (random_ids(10, 18), 3, None),
    "four tokens a block": (random_ids(17, 18), 4, None),
    "vocabulary of 2**18": (random_ids(200, 18), 16, None),
    "all sizes of int": (random_ids(400, 63), 24, None),
    "negative": ([-x for x in random_ids(300, 63)], 32, None),
    "bounds": (
        [s * (1 << b) + d for b in (7, 8, 15, 16, 31, 32, 62) for s in (1, -1) for d in (-1, 0, 1)],
        7,
        None,
    ),
    "beyond int64": ([2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 5] * 3, 6, None),
    "block of 300": (random_ids(1000, 18), 300, None),
    "block of more than a pickle frame": (random_ids(50_000, 31), 25_000, None),
    "salt on the first block": (
        random_ids(70, 18),
        16,
        [(("cache_salt", "tenant-7"),), None, None, None],
    ),
    "adapter": (random_ids(70, 18), 16, [(LORA,)] * 4),
    "adapter named like its path": (random_ids(40, 18), 16, [(("lora", IMAGE, IMAGE),)] * 2),
    "images": (
        random_ids(70, 18),
        16,
        [
            (("mm", IMAGE, 3),),
            (("mm", IMAGE, -13), ("mm", "bild-ä", 9)),
            None,
            (LORA, ("mm", IMAGE, -70_000)),
        ],
    ),
    "prompt embeddings": (random_ids(40, 18), 16, [(("prompt_embeds", bytes(range(32))),)] * 2),
    "long salt": (random_ids(40, 18), 16, [(("cache_salt", "s" * 300),), None]),
    "salt of more than a frame": (random_ids(40, 18), 16, [(("cache_salt", "s" * 70_000),), None]),
}

LAST_HASHES = {
    "one token a block": (
        "e05b8b6741265ad0e5ac3dc8a56ea5950d352c06aab77a85cffaf2ba4741bd8b",
        "f731e6417a21875fb2128b3b6163af9e78a11e5eb0f4950e6fd86ee4b2572a15",
        "b7eaac2666e1e056fb5927e3f97ec5ea",
        "b34836d006334d4aa4405e80245f1a5a",
    ),
    "two tokens a block": (
        "cf27ae57a53cabedff00d47ed9f9e258ae71a20681863785afb5a8795fef24cb",
        "0f7a0e17f5643418badac584e4e4a35a6378493e2d56abdf40af79ddbe064ee5",
        "cd00769d98d6bfa241c90c0ca21461ab",
        "e54f506966b3877f4ef9267d790f1653",
    ),
    "three tokens a block": (
        "142625806323219672721fcfd75e3da6f88bea4bd48d0e77d4c70ac687ac63f4",
        "ef5a345bed8597ae6891df4b483a3d949e03f5997ebbfdeca92e1210e85f5829",
        "cb75262315030144a86a0025c72dc4af",
        "cadde764f95bcf474cf27bef9387da48",
    ),
    "four tokens a block": (
        "4f48396f557de5d46667e7f1188c8ac527f650510cfe8f76ea965ea02177e1c5",
        "1000f0fcdd09064db62ae45476c7bbada736928149ec7c1cd9a61d1a974f6149",
        "b652d339be639e98aac3a0bc751ecd08",
        "0be4cf4393efa1f838502a6997160095",
    ),
    "vocabulary of 2**18": (
        "065f0b96265f849dcf972663dce567ff4b7dc8a558739f4fdd6f6bf235213c13",
        "c9b655168f21cc7eaa9ff29faa83f58068f5864c2ec2fbfd6e3909861814d679",
        "91b95ee2598595c1e44bcf9b93ea5118",
        "227e6a56f2bb8150413e8134f6658a3f",
    ),
    "all sizes of int": (
        "447f217694616644824e9b7126e2bd99fb96178e15a141d5fbd3f81bd6b1e0f9",
        "7a58b47e2a0e5fc872e9545fd28350a5ddaeff7489a9ccaaaca05fa36290e267",
        "ffd6b87845ac4af9c5179764f49411f3",
        "d32ec6a65db1d3312843513bdc52bf68",
    ),
    "negative": (
        "d64280f0881117f9d8992504f3366af16c2ac1a9dc1a201b4d894aac2cfcd6d3",
        "1293398c5182ec1abfd3fc67303e1f94a57692ec51618e274eeb6e3f0ce98991",
        "af448ec6f29261e7e92a52da67250faa",
        "babcb8c05789a4adeec027ec7d6bd287",
    ),
    "bounds": (
        "2b7394823d6d48bbd88e916d74a31c52dc47327b0d720b5cbbdcdcd42490456c",
        "75f9641271a81a190281886cf0ac161e2823157682a66eb144787beb5793ae4e",
        "670f406b90001f6ee8a04a35172bd8ac",
        "186786e6854ae62713f707a89450d27c",
    ),
    "beyond int64": (
        "575ce65fa1471735c0fe67dc6e48381623ec7415d4c3625747ffdbf605edb4e9",
        "a4e33141b661726f0e22e33233935c7d54d29e3f013bc52d80422ffa74fea61a",
        "d5a7bb7df8c208ab72a177a3f5be0d66",
        "c67097ce157fa431e8b7079b40d37ece",
    ),
    "block of 300": (
        "1414c5567a959c0eaed17213285cfde3a1978e6b5069b14c7828a92ee45e0ff3",
        "26f4f5b8911e3fa6ef53345cfadd767db98d3106997968e30e3fcd08a5aaf6d9",
        "423660932702da0de6422095d3f71ce3",
        "9832d1c0263bd1d870a995aab185292d",
    ),
    "block of more than a pickle frame": (
        "69ee27ff973bd160b42172e1295769e457e3df16ae3d789da4c470a7a83ba483",
        "400d2c5907571d633fb77bc7fb8d8830a016eafcd9ecd796e2144243c9ce2499",
        "d17797e780025a9f671bb7876eb7a7a4",
        "9d25247786edd548af2b17e7651d6921",
    ),
    "salt on the first block": (
        "f36ad56ef7bd287881929ec5eb6b3e31ae151d228655b7fa5a8053520415196c",
        "75b28aee4bc41e500bcd2c9e221880deffc6aecf5f360ad281fcbad39fa83fcb",
        "ed6147cdf9e2734d7fc63404aa111e2a",
        "599d7795b0ce83390123e2f2dca61525",
    ),
    "adapter": (
        "2df025f8a207fb5ddebe5d15b8a4a8d3b55fc3da3a093560263867f5a49cc911",
        "2ff9983549733493c6bd042cd9ea7cbbae5aa7243101094b54d9258e2fc54f9f",
        "a0b0443fa1caac2c6f4c12a768099301",
        "cca808e5fa89e5083fecd86d02f0a0fd",
    ),
    "adapter named like its path": (
        "031f59409f773e6e51f590e39616aee42d86def4245c6784f1b3fb690586690c",
        "a947422b5b6851f0b2f856767b55e414c9c9e37149cb6667e8cccdfeda9de158",
        "55436a9f40c2ecf94faef03b2e80a789",
        "eb9839d9e9a356e4d28e1b658db66456",
    ),
    "images": (
        "e8cdcf5459f028bf832c8e10f850e48aef34922931c2fc9abfcb35956c79769b",
        "ccfe5f5db6e532d67b4b635e3333c9fb58531fc7751b58d44614365adbf26a24",
        "0bbea32acdff62181b7fff64caf04eed",
        "3641ec61b71d0807953e91d540fc7fa6",
    ),
    "prompt embeddings": (
        "75d0a08c7802bf1b597e6698a52a79c5ba16ae1802f6d56c652693578f68240f",
        "b4d3892be4267b1701cef69a728659f38f038c476f91fa312bc710b0c23f17d5",
        "960e5d5b3261ba78768ad805ba242505",
        "a7121ca405c276fe1fd83681c31475b2",
    ),
    "long salt": (
        "3cf77a5dce6735c816c1f62cac250e41c49beb28f110e2d6e62d6c8ebdcb985e",
        "bd6e1f8e2e99327a1edfb612f4090cc755bfb9254ad3e28f6c0678f2f839e94d",
        "3d0c82382480ba7fb150025654f76672",
        "6555c8ebd0f709a30774429e5a7a16c4",
    ),
    "salt of more than a frame": (
        "86b7d15a69626f96a716ff37beb652a6a633b846dbe828abdccafb6c3c7a4203",
        "70d806823432acbc86987fbcf273ef3f1abe50c670321757b07d9ea8a2f61469",
        "d498cf3a9e25bcaab5d13fd0c61bbde7",
        "ec031896956d2264dcf925416ef24336",
    ),
}


def vllm_hashes(algorithm: str, case: str) -> list[bytes]:
    """Hash a case by vLLM's own functions."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    token_ids, size, extra_keys = CASES[case]
    hash_fn = get_hash_fn_by_name(algorithm)
    parent, hashes = hash_fn(SEED), []
    for i in range(len(token_ids) // size):
        keys = None if extra_keys is None else extra_keys[i]
        parent = hash_block_tokens(hash_fn, parent, token_ids[i * size : (i + 1) * size], keys)
        hashes.append(parent)
    return hashes


def our_hashes(algorithm: str, case: str) -> list[bytes]:
    token_ids, size, extra_keys = CASES[case]
    return hash_tokens(token_ids, size, algorithm, extra_keys=extra_keys)[:]


@pytest.fixture(params=ALGORITHMS)
def algorithm(request, monkeypatch):
    if request.param.startswith("xxhash"):
        pytest.importorskip("xxhash", reason="optional package xxhash is missing")
    if request.param.endswith("_cbor"):
        pytest.importorskip("cbor2", reason="optional package cbor2 is missing")
    monkeypatch.setenv("PYTHONHASHSEED", SEED)
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_the_last_hash_is_the_one_vllm_made(algorithm, case):
    assert our_hashes(algorithm, case)[-1].hex() == LAST_HASHES[case][ALGORITHMS.index(algorithm)]


@pytest.mark.parametrize("case", CASES)
def test_every_hash_is_the_one_vllm_makes(algorithm, case):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    assert our_hashes(algorithm, case) == vllm_hashes(algorithm, case)


def test_the_root_is_the_one_vllm_derives(algorithm, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    seeds = [SEED, "0"] + ([] if algorithm.startswith("xxhash") else [None])
    for seed in seeds:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED")
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        assert BlockHasher(16, algorithm).root == kv_cache_utils.NONE_HASH


def print_last_hashes() -> None:
    print("LAST_HASHES = {")
    for case in CASES:
        print(f'    "{case}": (')
        for algorithm in ALGORITHMS:
            print(f'        "{vllm_hashes(algorithm, case)[-1].hex()}",')
        print("    ),")
    print("}")


if __name__ == "__main__":
    print_last_hashes()
