import type { ReactNode } from "react";
export function Variants(): ReactNode { return null; }
