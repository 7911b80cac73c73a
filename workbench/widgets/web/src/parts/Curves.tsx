import type { ReactNode } from "react";
export function Curves(): ReactNode { return null; }
